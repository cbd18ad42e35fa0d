"""A streaming transport made slower in user space: its links let ``gbps`` through in each direction, and every message
takes half of ``round_trip_ms`` to arrive. For experiments on how hand-offs depend on the network; needs no root.

The sending end does all of it. A message travels as a header, which carries the payload's size, and pieces of the
payload, each a message of the inner link. Every piece leaves when the bytes before it would have left a link of that
rate, and is held back for half a round trip. So a receiver sees a payload arrive at the rate of the shaped link, also
when the handshake measures it. Both ends of a link must be shaped.

Pieces that are held back are views of the pool, not copies: `ShapedLink.drained` waits for them, and `ShapedLink.cut`
forgets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kv_transfer.base import MAX_PAYLOAD_BYTES, NOTHING, KVLink, Message, check_sizes
from kv_transfer.fetch import Fetch, Payload
from kv_transfer.transports.inbox import again
from pdserve.core.config import TransferConfig
from pdserve.core.errors import PeerLost, TransferError, TransferTimeout

SHAPEABLE = ("tcp", "grpc_stream", "torch_dist")
"""The transports whose payloads follow their announcement. One-sided ones read memory, past any shaper."""

_SIZE = struct.Struct("<Q")
_PIECE_S = 1e-3  # the time that a piece takes on the shaped link
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 16 * 2**10, 2**20
_AHEAD_S = 5e-3  # a message may be queued so long before the ones before it have left: or the link would idle
_EARLY_S = 0.5e-3  # timers wake up to 1 ms late; begun half of that early, pieces leave on time on average
_HELD_BYTES = 32 * 2**20  # held back at most, besides what is on its way for half a round trip
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A rate in 10^9 bits per second (None: as fast as the inner link is) and a round trip."""

    gbps: float | None
    round_trip_ms: float = 0.0

    @classmethod
    def of(cls, config: TransferConfig) -> Shape | None:
        """The shape that is configured; None if links are not shaped."""
        if config.shape_gbps is None and not config.shape_round_trip_ms:
            return None
        return cls(config.shape_gbps, config.shape_round_trip_ms)

    @property
    def bytes_per_s(self) -> float:
        """The rate; infinite if it is not bounded."""
        return float("inf") if self.gbps is None else self.gbps * 1e9 / 8

    @property
    def delay_s(self) -> float:
        """How long a message is on its way."""
        return self.round_trip_ms / 2e3

    @property
    def piece_bytes(self) -> int:
        """The size of the pieces in which payloads travel."""
        if self.gbps is None:
            return _MOST_PIECE_BYTES
        return round(min(max(self.bytes_per_s * _PIECE_S, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES))

    def __str__(self) -> str:
        rate = "" if self.gbps is None else f"{self.gbps:g} Gbit/s, "
        return f"{rate}round trip {self.round_trip_ms:g} ms"


class ShapedLink(KVLink):
    """A link whose messages leave ``inner`` later: see the module."""

    def __init__(self, inner: KVLink, shape: Shape) -> None:
        super().__init__(inner.memory)
        self.transport, self.codes, self.reads_late = inner.transport, inner.codes, inner.reads_late
        self._inner, self._shape = inner, shape
        self._loop = asyncio.get_running_loop()
        # Messages of the inner link, each with the time of the loop's clock when it leaves.
        self._held: deque[tuple[float, bytes, Payload]] = deque()
        self._held_bytes = self._queued = self._delivered = 0
        self._most_held_bytes = _HELD_BYTES
        if shape.gbps is not None:
            self._most_held_bytes += round(shape.bytes_per_s * shape.delay_s)
        self._free_s = 0.0  # when the last byte that was queued leaves the shaped link
        self._left = 0  # of the last message's payload: bytes of pieces that have not been received
        self._sending = asyncio.Lock()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._lost: TransferError | None = None
        self._closing = False
        self._delivering = asyncio.create_task(self._deliver())

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Queue one message; return when it has nearly left the shaped link."""
        header = _SIZE.pack(payload.size) + header
        check_sizes(header, payload)
        pieces = list(_pieces(payload, self._shape.piece_bytes))
        async with self._sending:
            await self._until(lambda: self._held_bytes < self._most_held_bytes)
            self._check_open()
            # All at once: a cancellation leaves no message that is incomplete.
            self._queue(header, NOTHING)
            for piece in pieces:
                self._queue(b"", piece)
        await self._wait_until_s(self._free_s - _AHEAD_S)
        self._check_open()

    async def drained(self) -> None:
        """Wait until nothing is held back, and nothing reads what has left."""
        queued = self._queued
        await self._until(lambda: self._delivered >= queued)
        await self._inner.drained()

    def introduced(self) -> None:
        """Lift the limits of the inner link's peer."""
        self._inner.introduced()

    def cut(self, why: str) -> None:
        """Forget what is held back, and cut the inner link."""
        self._end(PeerLost(f"{why} ({self.transport})"))
        self._inner.cut(why)

    async def recv(self) -> Message:
        """The next message."""
        while self._left:
            await self._next_piece()
        message = await self._received()
        if message.size or len(message.header) < _SIZE.size:
            raise self._malformed("a message without its size")
        (size,) = _SIZE.unpack_from(message.header)
        if size > MAX_PAYLOAD_BYTES:
            raise self._malformed(f"a payload of {size} bytes")
        self._left = size
        return Message(message.header[_SIZE.size :], size)

    async def _move(self, fetch: Fetch) -> None:
        """Receive the payload's pieces, and move each of them."""
        while self._left and not fetch.cancelled:
            await self._next_piece()
            await self._inner._move(fetch)

    async def aclose(self) -> None:
        """Send what is held back (for at most a second more than that takes), and close the inner link."""
        try:
            if self._lost is None and self._held and not self._closing:
                self._closing = True
                left_s = max(0.0, self._held[-1][0] - self._loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _CLOSE_S + self._shape.delay_s) + _CLOSE_S):
                        await self._until(lambda: not self._held)
        finally:
            self._end(PeerLost(f"the link was closed here ({self.transport})"))
            self._delivering.cancel()
            try:
                await self._inner.aclose()
            finally:
                self.on_closed(self)
        await asyncio.gather(self._delivering, return_exceptions=True)

    async def _received(self) -> Message:
        """The next message of the inner link."""
        try:
            return await self._inner.recv()
        except TransferError as error:
            self._end(again(error))
            raise

    async def _next_piece(self) -> None:
        piece = await self._received()
        if piece.header or not 0 < piece.size <= self._left:
            raise self._malformed(f"a piece of {len(piece.header)} + {piece.size} bytes, with {self._left} left")
        self._left -= piece.size

    def _malformed(self, what: str) -> PeerLost:
        why = f"the peer sent {what}; is its end of the link shaped as well?"
        self.cut(why)
        return PeerLost(f"{why} ({self.transport})")

    def _queue(self, header: bytes, payload: Payload) -> None:
        num_bytes = len(header) + payload.size
        self._free_s = max(self._free_s, self._loop.time()) + num_bytes / self._shape.bytes_per_s
        self._held.append((self._free_s + self._shape.delay_s, header, payload))
        self._held_bytes += num_bytes
        self._queued += 1
        self._changed.set()

    async def _deliver(self) -> None:
        """Send each message of the inner link when it is due."""
        try:
            while not self._ended.is_set():
                if not self._held:
                    await self._until(lambda: bool(self._held))
                    continue
                due_s, header, payload = self._held[0]
                await self._wait_until_s(due_s - _EARLY_S)
                if self._held:  # the link may have been cut meanwhile, here and below
                    await self._inner.send(header, payload)
                if self._held:
                    self._held.popleft()
                    self._held_bytes -= len(header) + payload.size
                    self._delivered += 1
                    self._changed.set()
        except TransferError as error:
            self._end(again(error))
            if isinstance(error, TransferTimeout):
                self._inner.cut(str(error))  # the task that receives ends as well

    def _end(self, error: TransferError) -> None:
        """Send nothing more. The first ``error`` is kept."""
        self._lost = self._lost or error
        self._held.clear()
        self._held_bytes, self._delivered = 0, self._queued
        self._changed.set()
        self._ended.set()

    def _check_open(self) -> None:
        if self._lost is not None:
            raise again(self._lost)
        if self._closing:
            raise PeerLost(f"the link was closed here ({self.transport})")

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the link has ended."""
        while self._lost is None and not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _wait_until_s(self, when_s: float) -> None:
        """Wait until a time of the loop's clock, or the end of the link."""
        if when_s > self._loop.time() and self._lost is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(when_s):
                    await self._ended.wait()


def _pieces(payload: Payload, piece_bytes: int) -> Iterator[Payload]:
    """The bytes of a payload on the host, in payloads of ``piece_bytes``."""
    parts: list[memoryview] = []
    room = piece_bytes
    for part in payload.parts:
        rest = part
        while rest.nbytes:
            parts.append(rest[:room])
            rest, room = rest[room:], room - parts[-1].nbytes
            if not room:
                yield Payload(None, (), parts)
                parts, room = [], piece_bytes
    if parts:
        yield Payload(None, (), parts)
