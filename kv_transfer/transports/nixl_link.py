"""A link whose payloads, where they lie in the sender's pool, the receiver reads out of it with NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kv_transfer.shared_memory import SharedMemory
from kv_transfer.sink import Sink
from kv_transfer.transports.nixl_agent import NixlAgent, Staging
from kv_transfer.transports.socket_link import FIRST_OWN_SIGNAL, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from pdserve.core.errors import PeerLost, TransferError

_READING, _READ = FIRST_OWN_SIGNAL, FIRST_OWN_SIGNAL + 1
_PIECE_BYTES = 4 * 2**20  # of one read: the next is under way while this one is copied into the pool
_ALONE_S = 0.001  # after which the peer is asked to help a read along


class NixlPeer(NamedTuple):
    """The other end's agent, and where its registered memory lies in its own process (of size 0 without any)."""

    name: str
    address: int
    size: int


class _Read(NamedTuple):
    handle: Any
    data: memoryview


class NixlLink(SocketLink):
    """References are into the peer's registered memory. A payload is read piece by piece into memory of this link, and
    copied from there: a read that is under way cannot be called back, so none may go straight into a pool, whose
    blocks may be somebody else's by the time it ends.

    Where no hardware serves reads (UCX over TCP, or a connection that is only being set up) it is the peer's process
    that does, while it is asked to: its end needs a task that receives. ``agent`` stays its owner's; this link's share
    of the peer is given back when it closes. ``timeout_s`` bounds the read of a piece.

    A read may end after the peer has cut the link: the cut travels by TCP, on another path than the read. What is read
    is therefore always hashed (`reads_late`)."""

    reads_late = True

    def __init__(
        self,
        transport: str,
        stream: SocketStream,
        agent: NixlAgent,
        memory: SharedMemory | None,
        peer: NixlPeer,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(transport, stream, memory)
        self._agent, self._peer, self._timeout_s = agent, peer, timeout_s
        self._peer_size = peer.size
        self._staging: Staging | None = None
        self._reading = asyncio.Lock()
        self._asked = self._needs_help = False
        self._helping: asyncio.Task[None] | None = None
        self._released = False

    async def take(self, sink: Sink) -> None:
        """Move the payload: from the socket, or read it from the peer's memory. A peer that is known to have left ends
        that early; whether what was read is what was meant, the checksum tells."""
        if not self._references:
            await super().take(sink)
            return
        places = [(self._peer.address + offset, size) for offset, size in self._references]
        self._references.clear()
        async with self._reading:
            self._check_open()
            await self._move(places, sink)
            self._check_open()

    async def aclose(self) -> None:
        """Close the socket, end a read, forget the peer."""
        self._closed = True  # a task that reads sees it, and lets go of the lock
        async with self._reading:
            if not self._released:
                self._released = True
                if self._staging is not None:
                    self._agent.unstage(self._staging)
                self._agent.remove_peer(self._peer.name)
        await super().aclose()

    async def _move(self, places: Sequence[tuple[int, int]], sink: Sink) -> None:
        if self._staging is None:
            self._staging = self._agent.stage(2 * _PIECE_BYTES)
        reads: deque[_Read] = deque()  # at most two, each in its half of the staging memory
        try:
            for i, piece in enumerate(_pieces(places)):
                if sink.closed:
                    break
                start, size = i % 2 * _PIECE_BYTES, sum(length for _, length in piece)
                handle = self._agent.read(self._peer.name, piece, self._staging.address + start)
                reads.append(_Read(handle, self._staging.view[start : start + size]))
                if len(reads) == 2:
                    await self._land(reads, sink)
            while reads:
                await self._land(reads, sink)
        except PeerLost as error:
            raise self._stream.lose(error) from None
        finally:
            for read in reads:
                self._stream.lose("a read of the peer's memory was left unfinished")
                self._agent.abandon(read.handle, self._staging)
            if self._asked:
                self._asked = False
                with contextlib.suppress(TransferError):
                    await self._send_signal(_READ)

    async def _land(self, reads: deque[_Read], sink: Sink) -> None:
        """Wait for the first of ``reads``, and copy what it brought."""
        started_s = time.monotonic()
        while not self._agent.done(reads[0].handle):
            self._check_open()
            waited_s = time.monotonic() - started_s
            if waited_s > self._timeout_s:
                raise PeerLost(f"reading the peer's memory took longer than {self._timeout_s} s")
            if not self._asked and (self._needs_help or waited_s > _ALONE_S):
                self._asked = self._needs_help = True
                await self._send_signal(_READING)
            # NIXL has nothing to wait on: without a thread of its own, a read goes on only while it is asked about.
            await asyncio.sleep(0)
        sink.write(reads.popleft().data)

    def _check_open(self) -> None:
        if self._closed:
            raise self._stream.lose("the link was closed here")
        super()._check_open()

    async def _on_signal(self, kind: int) -> None:
        if kind == _READING:
            self._stop_helping()
            self._helping = asyncio.create_task(self._help())
        elif kind == _READ:
            self._stop_helping()
        else:
            await super()._on_signal(kind)

    async def _help(self) -> None:
        """Make progress with what the peer reads here, until it says that it has read (or should have)."""
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.suppress(PeerLost):  # the one that reads sees it too
            while time.monotonic() < deadline_s and not self._closed:
                self._agent.progress()
                await asyncio.sleep(0)  # as in `_land`

    def _stop_helping(self) -> None:
        if self._helping is not None:
            self._helping.cancel()
            self._helping = None

    def _let_go(self) -> None:
        self._stop_helping()
        super()._let_go()


def _pieces(places: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same memory in runs of _PIECE_BYTES (the last one may be shorter)."""
    piece: list[tuple[int, int]] = []
    room = _PIECE_BYTES
    for start, size in places:
        address, end = start, start + size
        while address < end:
            length = min(room, end - address)
            piece.append((address, length))
            address, room = address + length, room - length
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece
