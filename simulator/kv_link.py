"""A transport of KV in the world: messages over a `Connection`, and payloads that the receiver reads from the sender's
memory (as the one-sided transports do) or that travel with the message (as the streaming ones do)."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from contract.kv import Ack, Announce, Blocks, Confirm, Header, Rated, decode
from contract.message import encode
from kv_transfer.base import NOTHING, KVLink, KVTransport, Message, check_sizes
from kv_transfer.fetch import Fetch, Payload
from kv_transfer.memory import Memory
from pdserve.core.errors import PdserveError, PeerLost
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region
from simulator.loop import Mailbox, WorldLoop
from simulator.network import Connection, Network, Process

NAME = "simulated"
PIECES = 3
"""A payload is written in so many pieces, between which other threads run."""
MAX_COMMIT_S = 0.01
"""How long a copy to a device takes, at most."""

Check = Callable[[Sequence[Region]], None]
"""Is told of the regions of a pool that a link is about to read or to write."""


class Wires(NamedTuple):
    """What the links of a transport have in common."""

    check: Check
    chance: random.Random
    one_sided: bool
    on_device: bool
    """Nothing is hashed, as between GPUs."""
    corrupt_share: float
    defect_share: float
    bytes_per_s: float
    strays: list[tuple[WorldLink, bytes]]
    """Headers that arrive a second time, over another link than before."""

    def carry(self, piece: memoryview) -> memoryview:
        """A piece as it arrives."""
        if not self.corrupt_share or self.chance.random() >= self.corrupt_share:
            return piece
        changed = bytearray(piece)
        changed[self.chance.randrange(len(changed))] ^= 1 << self.chance.randrange(8)
        return memoryview(changed)

    def headers(self, header: bytes) -> list[bytes]:
        """The headers that are sent for a message: its own, or with a defect that one twice, or a wrong one."""
        if not self.defect_share or self.chance.random() >= self.defect_share:
            return [header]
        message = decode(header)
        if not isinstance(message, Announce | Ack | Blocks):  # those of the handshake have no defects
            return [header]
        wrong = _wrong(message, again=not self.corrupt_share)
        return self.chance.choice([[header, header], *([encode(each)] for each in wrong)])


def _wrong(message: Announce | Ack | Blocks, *, again: bool) -> list[Header]:
    """Headers that are wrong in place of ``message``. The receiver can notice each of them: hashes cover payload and
    trailer alone, so a wrong slot lies outside of the transfer, or with ``again``, where no message is sent twice, it
    is filled."""
    fields: list[dict[str, Any]] = []
    if isinstance(message, Announce):
        fields = [{"num_blocks": message.num_blocks + 1}, {"num_skipped": message.num_blocks + 1}]
    elif isinstance(message, Blocks):
        fields = [
            {"seq": message.seq + 1},
            {"first_slot": message.first_slot + 1000},
            {"first_layer": message.first_layer + 100},
            {"num_blocks": 0},
            {"trailer": b"\xc1"} if message.last else {"last": True},
            {"attempt_id": f"{message.attempt_id}'"},
            {"epoch": f"{message.epoch}'"},
            *([{"first_slot": message.first_slot - message.num_blocks}] if again else []),
        ]
    unexpected = Rated(0) if isinstance(message, Blocks) else Confirm("")
    return [unexpected, *(msgspec.structs.replace(message, **each) for each in fields)]


class WorldTransport(KVTransport):
    """The transport of a worker's ``process``. With ``one_sided``, payloads are read when they are fetched, and not
    when they are sent."""

    name = NAME

    def __init__(
        self,
        network: Network,
        process: Process,
        memory: Memory,
        check: Check,
        chance: random.Random,
        *,
        one_sided: bool,
        on_device: bool,
        corrupt_share: float,
        defect_share: float,
        bytes_per_s: float,
    ) -> None:
        super().__init__(memory)
        self._network, self._process = network, process
        self._wires = Wires(check, chance, one_sided, on_device, corrupt_share, defect_share, bytes_per_s, [])
        self._address = ""

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """See `KVTransport`."""
        loop = _running()
        self._address = f"{self._process.name}/kv/{loop.number()}"
        self._network.servers[self._address] = self._process, loop, self._meet
        return KVEndpoint(NAME, self._address)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """See `KVTransport`."""
        try:
            server, server_loop, meet = await self._network.reach(self._process, endpoint.address, timeout_s)
        except PdserveError as error:
            raise PeerLost(str(error)) from None
        connection = self._network.connection(self._process, server)
        link = WorldLink(self._memory, connection, 0, self._wires)
        server_loop.call_soon(meet, connection)
        return self._keep(link)

    async def aclose(self) -> None:
        """See `KVTransport`."""
        self._network.servers.pop(self._address, None)
        await super().aclose()

    def _meet(self, connection: Connection) -> None:
        if self._closed:
            connection.close("it does not listen any more", by=1)
            return
        link = WorldLink(self._memory, connection, 1, self._wires)
        self._accepted.put_nowait(self._keep(link))


class WorldLink(KVLink):
    """One end of a link. ``side`` as in `Connection`."""

    transport = NAME

    def __init__(self, memory: Memory, connection: Connection, side: int, wires: Wires) -> None:
        super().__init__(memory)
        self.reads_late, self.on_device = wires.one_sided, wires.on_device
        self._connection, self._side, self._wires, self._one_sided = connection, side, wires, wires.one_sided
        self._arrived: Mailbox[tuple[bytes, _Sent | None] | None] = Mailbox()
        self._payload: _Sent | None = None
        self._unread: deque[_Sent] = deque()
        self._why = ""
        connection.attach(side, _running(), self._arrived.put, self._end)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._arrived.put(None)
        for sent in self._unread:
            sent.done.set()

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """See `KVLink`."""
        check_sizes(header, payload)
        if self._why:
            raise PeerLost(self._why)
        for each in self._wires.headers(header):
            sent = _Sent(payload, self._wires.check, one_sided=self._one_sided) if payload.size else None
            if sent is not None and self._one_sided:
                while self._unread and self._unread[0].done.is_set():
                    self._unread.popleft()
                self._unread.append(sent)
            self._connection.send(self._side, (each, sent))
        await asyncio.sleep(0)

    async def drained(self) -> None:
        """See `KVLink`."""
        for sent in list(self._unread):
            await sent.done.wait()

    def cut(self, why: str) -> None:
        """See `KVLink`."""
        self._connection.close(why, by=self._side)
        self._end(why)

    async def recv(self) -> Message:
        """See `KVLink`."""
        if self._payload is not None:
            self._payload.finish(self._connection)
            self._payload = None
        if (stray := self._stray()) is not None:
            return Message(stray, 0)
        item = await self._arrived.get()
        if item is None:
            self._arrived.put(None)
            raise PeerLost(self._why)
        header, self._payload = item
        if self._wires.defect_share and self._wires.chance.random() < self._wires.defect_share:
            self._wires.strays.append((self, header))
        return Message(header, 0 if self._payload is None else self._payload.size)

    def _stray(self) -> bytes | None:
        """A message about blocks that arrived over another link."""
        if self._wires.strays and self._wires.strays[0][0] is not self:
            header = self._wires.strays.pop(0)[1]
            return header if isinstance(decode(header), Blocks) else None
        return None

    def fetch(self, into: Sequence[Region], **options: Any) -> Fetch:
        """See `KVLink`."""
        return WorldFetch(self._wires, self.memory, into, self._move, on_device=self.on_device, **options)

    async def _move(self, fetch: Fetch) -> None:
        if (sent := self._payload) is None:
            return
        try:
            for piece in _pieces(sent.parts(), -(-sent.size // PIECES)):
                if self._one_sided:
                    await self._copy(fetch, sent, piece)
                else:
                    await asyncio.sleep(_size(piece) / self._wires.bytes_per_s)
                    if self._why:
                        raise PeerLost(self._why)
                    if not fetch.cancelled:
                        self._wires.check(fetch.regions)
                        for part in piece:
                            fetch.write(self._wires.carry(part))
                if fetch.cancelled:
                    return
            if self._why:
                raise PeerLost(self._why)
        finally:
            sent.finish(self._connection)
            self._payload = None

    async def _copy(self, fetch: Fetch, sent: _Sent, piece: Sequence[memoryview]) -> None:
        """Read a piece where it is. What has begun is written, whether it is wanted any more or not."""
        size = _size(piece)
        target = _first(fetch.views(), size)
        with fetch.writing():
            await asyncio.sleep(size / self._wires.bytes_per_s)
            if self._connection.is_held(1 - self._side):
                sent.check(sent.regions)
            self._wires.check(fetch.regions)
            data = memoryview(b"".join(self._wires.carry(part) for part in piece))
            for view in target:
                view[:], data = data[: view.nbytes], data[view.nbytes :]
            if not fetch.cancelled:
                fetch.advance(size)

    async def aclose(self) -> None:
        """See `KVLink`."""
        if not self._why:
            self._connection.close("the peer closed the link", by=self._side)
            self._end("the link was closed here")
        self.on_closed(self)


class WorldFetch(Fetch):
    """Takes time to copy from the host to the device, where nothing is hashed."""

    def __init__(self, wires: Wires, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wires = wires

    async def commit(self) -> None:
        """See `Fetch`."""
        if self._wires.on_device and not self.cancelled:
            with self.writing():
                await asyncio.sleep(self._wires.chance.uniform(0.0, MAX_COMMIT_S))


class _Sent:
    """A payload on its way."""

    def __init__(self, payload: Payload, check: Check, *, one_sided: bool) -> None:
        self.size, self.regions, self.check = payload.size, payload.regions, check
        self.done = asyncio.Event()
        """Set, on the sender's thread, when nothing reads the payload any more."""
        self._sender = _running()
        self._parts = payload.parts if one_sided else [memoryview(bytes(part)) for part in payload.parts]

    def parts(self) -> list[memoryview]:
        """The bytes, as they are now."""
        return list(self._parts)

    def finish(self, connection: Connection) -> None:
        """Tell the sender that nothing reads it any more."""
        self._sender.call_later(connection.network.delay_s(), self.done.set)


def _size(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)


def _pieces(parts: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The bytes of ``parts`` in pieces of ``size`` bytes; the last may be smaller."""
    piece, room = list[memoryview](), size
    for part in parts:
        while part.nbytes:
            piece.append(part[:room])
            room -= piece[-1].nbytes
            part = part[piece[-1].nbytes :]
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _first(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first ``size`` bytes of ``views``."""
    found: list[memoryview] = []
    for view in views:
        if size <= 0:
            break
        found.append(view[:size])
        size -= view.nbytes
    return found


def _running() -> WorldLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop), "a world runs it"
    return loop
