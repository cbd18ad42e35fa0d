"""Transport by NIXL with its UCX backend. The receiver reads payloads from the sender's pool into its own, on hosts or
GPUs, by RDMA if available. Messages travel over a TCP connection per link.

Once both ends are proven, they exchange the metadata of their agents and the addresses of their registered memory. Each
can then read the other's whole pool, so the hosts of the network must trust each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kv_transfer.fetch import Fetch, Payload
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.transports.nixl_agent import NAME_BYTES, NixlAgent, RemoteMemory
from kv_transfer.transports.socket_link import FIRST_OWN_SIGNAL, MAX_REFERENCES, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import read_exactly
from kv_transfer.transports.tcp import TcpTransport, tune
from pdserve.core.errors import PeerLost, TransferError
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region, pair_regions
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

_ABOUT = struct.Struct(f"<{NAME_BYTES}sQQiI")  # agent; its memory: address, size, device (-1: host); bytes of metadata
_MAX_METADATA_BYTES = 256 * 2**10
_WATCH_S = 0.01
_READING, _READ = FIRST_OWN_SIGNAL, FIRST_OWN_SIGNAL + 1
_PIECE_BYTES = 4 * 2**20  # of one read; the next read runs while a piece is hashed
_READS = 2  # at a time
_ALONE_S = 0.001  # after this time, the peer is asked to help


class NixlTransport(TcpTransport):
    """``timeout_s`` also bounds the read of a piece."""

    name = "nixl"
    encrypts = False

    def __init__(
        self, memory: Memory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, secret, tls=tls, timeout_s=timeout_s)
        self._making: asyncio.Task[NixlAgent] | None = None
        self._left: dict[Any, tuple[str, Fetch]] = {}  # reads in progress whose links are lost
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections. NIXL picks its own ports. ConfigError without NIXL."""
        await self._agent()
        return await super().listen(host, port)

    async def aclose(self) -> None:
        """Stop listening, close every link, and close the agent, which ends all reads."""
        await super().aclose()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        making, self._making = self._making, None
        if making is not None:
            await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                await in_thread("kv-nixl-close", making.result().close)
        for _, fetch in self._left.values():
            fetch.end_writing()
        self._left.clear()

    async def _agent(self) -> NixlAgent:
        """The agent, created by the first call. A cancelled call does not stop the creation. ConfigError if it
        fails."""
        if self._making is None:
            self._making = asyncio.create_task(in_thread("kv-nixl", lambda: NixlAgent(self._memory)))
        return await asyncio.shield(self._making)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> NixlLink:
        tune(connection)
        # The end that connected sends first: if both sent at once, large metadata might fill the sockets' buffers.
        agent = await self._agent()
        if connecting:
            await self._introduce(connection, agent)
        name, address, size, device, metadata_bytes = _ABOUT.unpack(await read_exactly(connection, _ABOUT.size))
        if metadata_bytes > _MAX_METADATA_BYTES:
            raise EOFError(f"the peer announced {metadata_bytes} bytes of metadata")
        metadata = await read_exactly(connection, metadata_bytes)
        if not connecting:
            await self._introduce(connection, agent)
        other = RemoteMemory(name.decode("ascii", "replace"), address, size, max(device, 0))
        if (device < 0) == self._memory.on_device:
            raise EOFError("one pool is on a GPU, and the other one on a host")
        agent.add_peer(other.agent, metadata)
        stream = SocketStream(connection, peer, self.name, self._timeout_s)
        return NixlLink(self.name, self._memory, stream, agent, other, leave=self._leave, timeout_s=self._timeout_s)

    async def _introduce(self, connection: socket.socket, agent: NixlAgent) -> None:
        memory = self._memory
        device = memory.index if isinstance(memory, DeviceMemory) else -1
        about = _ABOUT.pack(agent.name.encode(), memory.address, memory.size, device, len(agent.metadata))
        await asyncio.get_running_loop().sock_sendall(connection, about + agent.metadata)

    def _leave(self, agent: NixlAgent, peer: str, handle: Any, fetch: Fetch) -> None:
        """Watch a read whose link is lost until it ends, because it still writes its regions. The peer must stay known
        to NIXL until then."""
        agent.hold_peer(peer)
        self._left[handle] = peer, fetch
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        agent = await self._agent()
        while self._left:
            for handle, (peer, fetch) in list(self._left.items()):
                try:
                    ended = agent.state(handle) != "PROC"
                except PeerLost:  # the state is unknown: the read may write until the agent is closed
                    ended = False
                if ended:
                    del self._left[handle]
                    agent.remove_peer(peer)
                    fetch.end_writing()
            await asyncio.sleep(_WATCH_S)


class NixlLink(SocketLink):
    """A link to the owner of the registered memory ``peer``. Payloads are read in pieces into their regions.

    A read cannot be cancelled, so a fetch is at rest only when its reads have ended. If the link is lost before, the
    reads are passed to ``leave``. ``agent`` stays open when the link closes. ``timeout_s`` bounds the read of a piece.

    Where no hardware serves reads (UCX over TCP, or while UCX connects), the peer's process does so on request. For
    this, the peer needs a task that receives.

    Coded payloads, which lie in no registered memory, come over the TCP connection.

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
        self.on_device, self.codes = memory.on_device, not memory.on_device
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
        reads: deque[tuple[Any, int]] = deque()  # their handles and sizes
        async with self._reading:
            self._check_open()
            try:
                for piece in _pieces(pair_regions(fetch.regions, references)):
                    if fetch.cancelled:
                        break
                    reads.append((self._agent.read(self._peer, piece), sum(ours.size for ours, _ in piece)))
                    fetch.begin_writing()
                    if len(reads) == _READS:
                        await self._end_first(reads, fetch)
                while reads:
                    await self._end_first(reads, fetch)
            except PeerLost as error:
                raise self._stream.lose(error) from None
            finally:
                for handle, _ in reads:
                    self._stream.lose("a read of the peer's memory is still in progress")
                    self._leave(self._agent, self._peer.agent, handle, fetch)
                if self._ask_again_s:
                    self._ask_again_s = 0.0
                    with contextlib.suppress(TransferError):
                        await self._send_signal(_READ)

    async def _end_first(self, reads: deque[tuple[Any, int]], fetch: Fetch) -> None:
        """Wait until the first of ``reads`` has ended."""
        started_s = time.monotonic()
        while (state := self._agent.state(reads[0][0])) == "PROC":
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
        _, size = reads.popleft()
        if state == "DONE":
            fetch.advance(size)
        fetch.end_writing()
        if state != "DONE":
            raise PeerLost("reading the peer's memory failed")

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
