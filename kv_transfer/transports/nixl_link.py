"""A link whose receiver reads payloads from the sender's memory into its own with NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kv_transfer.fetch import Fetch, Payload
from kv_transfer.memory import Memory
from kv_transfer.transports.nixl_agent import NixlAgent, ReadFailed, RemoteMemory
from kv_transfer.transports.socket_link import FIRST_OWN_SIGNAL, MAX_REFERENCES, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from pdserve.core.errors import PeerLost, TransferError
from pdserve.core.kv_layout import Region, pair_regions

_READING, _READ = FIRST_OWN_SIGNAL, FIRST_OWN_SIGNAL + 1
_PIECE_BYTES = 4 * 2**20  # of one read; the next read runs while a piece is hashed
_READS = 2  # at a time
_ALONE_S = 0.001  # after this time, the peer is asked to help


class _Read(NamedTuple):
    handle: Any
    size: int


class NixlLink(SocketLink):
    """A link to the owner of the registered memory ``peer``. Payloads are read in pieces into their regions.

    A read cannot be cancelled, so a fetch is at rest only when its reads have ended. If the link is lost before, the
    reads are passed to ``leave``. ``agent`` stays open when the link closes. ``timeout_s`` bounds the read of a piece.

    Where no hardware serves reads (UCX over TCP, or while UCX connects), the peer's process does so on request. For
    this, the peer needs a task that receives.

    A read may end after the peer has cut the link, because the two travel on different paths. Therefore a payload
    counts only with a correct checksum, or if the peer confirms that it held the blocks (`reads_late`)."""

    reads_late = True

    def __init__(
        self,
        transport: str,
        memory: Memory,
        stream: SocketStream,
        agent: NixlAgent,
        peer: RemoteMemory,
        *,
        leave: Callable[[NixlAgent, str, Any, Fetch], None],
        timeout_s: float,
    ) -> None:
        super().__init__(transport, memory, stream, peer_size=peer.size)
        self.on_device = memory.on_device
        self._agent, self._peer, self._leave, self._timeout_s = agent, peer, leave, timeout_s
        self._reading = asyncio.Lock()
        self._needs_help = False
        self._ask_again_s = 0.0  # 0: the peer was not asked to help with this fetch
        self._helping: asyncio.Task[None] | None = None
        self._released = False

    async def aclose(self) -> None:
        """Close the socket, stop reading, and remove the peer from the agent."""
        self._closed = True  # a reading task sees it, and releases the lock
        try:
            async with self._reading:
                if not self._released:
                    self._released = True
                    self._agent.remove_peer(self._peer.agent)
        finally:
            await super().aclose()

    def _refer(self, payload: Payload) -> Sequence[Region]:
        if len(payload.regions) <= MAX_REFERENCES:
            return payload.regions
        if self.on_device:
            raise ValueError(f"a payload of {len(payload.regions)} regions ({self.transport})")
        return ()

    async def _fetch_references(self, references: Sequence[Region], fetch: Fetch) -> None:
        reads: deque[_Read] = deque()
        async with self._reading:
            self._check_open()
            try:
                for piece in _pieces(pair_regions(fetch.regions, references)):
                    if fetch.cancelled:
                        break
                    reads.append(_Read(self._agent.read(self._peer, piece), sum(ours.size for ours, _ in piece)))
                    fetch.begin_writing()
                    if len(reads) == _READS:
                        await self._end_first(reads, fetch)
                while reads:
                    await self._end_first(reads, fetch)
            except PeerLost as error:
                raise self._stream.lose(error) from None
            finally:
                for read in reads:
                    self._stream.lose("a read of the peer's memory is still in progress")
                    self._leave(self._agent, self._peer.agent, read.handle, fetch)
                if self._ask_again_s:
                    self._ask_again_s = 0.0
                    with contextlib.suppress(TransferError):
                        await self._send_signal(_READ)

    async def _end_first(self, reads: deque[_Read], fetch: Fetch) -> None:
        """Wait until the first of ``reads`` has ended."""
        started_s = time.monotonic()
        while True:
            try:
                if self._agent.done(reads[0].handle):
                    break
            except ReadFailed as error:
                reads.popleft()
                fetch.end_writing()
                raise PeerLost(str(error)) from None
            self._check_open()
            waited_s = time.monotonic() - started_s
            if waited_s > self._timeout_s:
                raise PeerLost(f"reading the peer's memory took longer than {self._timeout_s} s")
            if (self._needs_help or waited_s > _ALONE_S) and time.monotonic() > self._ask_again_s:
                self._needs_help = True
                self._ask_again_s = time.monotonic() + self._timeout_s / 2  # the peer helps for the whole timeout
                await self._send_signal(_READING)
            # NIXL offers no event to wait for. Without a thread of its own, it makes progress only when it is polled.
            await asyncio.sleep(0)
        fetch.advance(reads.popleft().size)
        fetch.end_writing()

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
        """Serve the peer's reads until it sends `_READ`, or the timeout has passed."""
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.suppress(PeerLost):  # the reading end gets the error too
            while time.monotonic() < deadline_s and not self._closed:
                self._agent.progress()
                await asyncio.sleep(0)  # as in `_end_first`

    def _stop_helping(self) -> None:
        if self._helping is not None:
            self._helping.cancel()
            self._helping = None

    def _let_go(self) -> None:
        self._stop_helping()
        super()._let_go()


def _pieces(pairs: Iterable[tuple[Region, Region]]) -> Iterator[list[tuple[Region, Region]]]:
    """Split the pairs into lists of _PIECE_BYTES; the last one may be shorter."""
    piece: list[tuple[Region, Region]] = []
    room = _PIECE_BYTES
    for (ours, size), (theirs, _) in pairs:
        start = 0
        while start < size:
            length = min(room, size - start)
            piece.append((Region(ours + start, length), Region(theirs + start, length)))
            start, room = start + length, room - length
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece
