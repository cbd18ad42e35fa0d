"""Reading a message's bytes from a pool (`Payload`), and writing them into one (`Fetch`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from contract.kv import checksum
from kv_transfer.codec import Codec
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from pdserve.core.kv_layout import Region, pair_regions
from runtime.threads import in_thread

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

PIECE_BYTES = 2**20
"""Copies are hashed in pieces of this size, while a piece is in the processor's cache."""

_INLINE_BYTES = 128 * 2**10
"""So much at most is coded in the event loop, which takes some 0.2 ms."""

_SPIN_S, _POLL_S = 1e-3, 1e-3
"""How long the end of copies is asked for in every turn of the event loop, and how often after that. A timer of the
event loop takes at least 1 ms, and a copy may be much shorter."""


class Payload:
    """The payload of a message: ``regions`` of ``memory``, or ``parts`` on the host if ``memory`` is None. ``size`` is
    in bytes."""

    __slots__ = ("_parts", "memory", "regions", "size")

    def __init__(
        self, memory: Memory | None, regions: Sequence[Region], parts: Sequence[memoryview] | None = None
    ) -> None:
        self.memory, self.regions, self._parts = memory, regions, parts
        self.size = 0
        for region in regions:
            self.size += region.size
        for part in parts or ():
            self.size += part.nbytes

    @property
    def parts(self) -> Sequence[memoryview]:
        """The bytes on the host, in order. Empty for memory on a device."""
        if self._parts is None:
            memory = self.memory
            self._parts = [memory.view(region) for region in self.regions] if isinstance(memory, HostMemory) else ()
        return self._parts

    async def checksum(self, trailer: bytes) -> int:
        """The checksum of the payload, followed by ``trailer``. ValueError if the memory is closed."""
        if isinstance(self.memory, DeviceMemory):
            return await _device_checksum(self.memory, self.regions, trailer)
        return checksum(self.parts, trailer)


async def _device_checksum(memory: DeviceMemory, regions: Sequence[Region], trailer: bytes) -> int:
    """The checksum of regions on a device, which computes it, and of ``trailer``."""
    digest = memory.digest(regions)
    await settled(memory)
    return xxhash.xxh3_64_intdigest(digest() + trailer)


async def staged(memory: DeviceMemory, regions: Sequence[Region]) -> Payload:
    """A payload of regions on a device, copied to the host. ValueError if the memory is closed."""
    copies = memory.staging(sum(region.size for region in regions))
    memory.copy(regions, copies, to_device=False)
    await settled(memory)
    return Payload(None, (), [copies])


def _copy(data: memoryview, into: Sequence[memoryview]) -> None:
    source, start = np.frombuffer(data, dtype=np.uint8), 0
    for part in into:
        np.copyto(np.frombuffer(part, dtype=np.uint8), source[start : start + part.nbytes])
        start += part.nbytes


async def _aside(name: str, num_bytes: int, work: Callable[[], T]) -> T:
    """What ``work`` on so many bytes gives: in a thread of its own, unless that takes longer to start."""
    return await in_thread(name, work) if num_bytes > _INLINE_BYTES else work()


async def settled(memory: Memory) -> None:
    """Wait until the copies begun so far from and to a device have ended. Does not block the event loop."""
    if isinstance(memory, DeviceMemory):
        have_ended, began_s = memory.settled(), time.monotonic()
        while not have_ended():  # noqa: ASYNC110 - a device offers no event that asyncio can wait for
            await asyncio.sleep(0 if time.monotonic() - began_s < _SPIN_S else _POLL_S)


async def coded_payload(codec: Codec, payload: Payload) -> Payload:
    """``payload``, whose bytes are on the host, coded; itself, if that does not make it smaller."""
    coded = await _aside("kv-code", payload.size, lambda: codec.encode(payload.parts))
    return Payload(None, (), [coded]) if coded.nbytes < payload.size else payload


class Coded(NamedTuple):
    """How a payload is coded, and its bytes on the way."""

    codec: Codec
    size: int


class Fetch:
    """Moves the payload of a link's last message into ``regions`` of this end's memory, which have its size. Belongs to
    one event loop.

    Await it to move the bytes. It returns early after `cancel`; it raises PeerLost if the link is lost. `commit` then
    decodes bytes that are ``coded``, and copies bytes that were staged on the host to the device. After `cancel`, no
    further write begins; after `at_rest`, nothing writes the regions.

    ``hashed``: bytes that come by way of the host are hashed while they move; ``digest_s`` is the time for that, in
    seconds.
    ``on_progress`` is called after each move.
    """

    def __init__(
        self,
        memory: Memory,
        regions: Sequence[Region],
        move: Callable[[Fetch], Coroutine[Any, Any, None]],
        *,
        on_device: bool,
        hashed: bool = False,
        coded: Coded | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.regions, self.cancelled, self.digest_s = regions, False, 0.0
        self._digest = xxhash.xxh3_64() if hashed and not (on_device and isinstance(memory, DeviceMemory)) else None
        self._memory, self._move, self._on_progress = memory, move, on_progress
        self._staged: memoryview | None = None
        self._parts: list[memoryview] = []  # of host memory, still to be filled, in reverse order
        self._codec: Codec | None = None
        self.size = 0
        """Bytes to be moved."""
        for region in regions:
            self.size += region.size
        if coded is not None:
            self._codec, self.size = coded
            self._staged = memoryview(bytearray(self.size))
            self._parts = [self._staged]
        elif isinstance(memory, HostMemory):
            self._parts = [memory.view(region) for region in reversed(regions)]
        elif not on_device:
            self._staged = memory.staging(self.size)
            self._parts = [self._staged]
        self.left = self.size
        self._writers = 0
        self._resting: asyncio.Event | None = None

    def __await__(self) -> Generator[Any, None, None]:
        return self._move(self).__await__()

    async def commit(self) -> None:
        """Decode bytes that are coded, copy bytes that were staged on the host to the device, and wait for all copies.
        ValueError if they are not coded as they should be."""
        if self._codec is not None and not self.cancelled:
            codec, coded, size = self._codec, self._staged, sum(region.size for region in self.regions)
            assert coded is not None, "what is coded is staged"
            self._staged = await _aside("kv-decode", size, lambda: codec.decode(coded, size))
            if isinstance(self._memory, HostMemory) and not self.cancelled:
                _copy(self._staged, [self._memory.view(region) for region in self.regions])
        if isinstance(self._memory, DeviceMemory) and not self.cancelled:
            with self.writing():
                if self._staged is not None:
                    self._memory.copy(self.regions, self._staged, to_device=True)
                await settled(self._memory)

    async def checksum(self, trailer: bytes) -> int:
        """The checksum of the bytes that were moved, all of them, and of ``trailer``. Requires ``hashed``."""
        if self._digest is None:
            assert isinstance(self._memory, DeviceMemory), "nothing was hashed"
            return await _device_checksum(self._memory, self.regions, trailer)
        self._digest.update(trailer)
        return self._digest.intdigest()

    def cancel(self) -> None:
        """Begin no further write. May be called twice, or after the end."""
        self.cancelled = True
        self._parts.clear()

    async def at_rest(self) -> None:
        """Wait until nothing writes the regions. Unbounded, because a one-sided read that has begun cannot be
        cancelled, and its regions must not be reused before it ends."""
        while self._writers:
            if self._resting is None:
                self._resting = asyncio.Event()
            await self._resting.wait()

    # --- for the transports ------------------------------------------------------------------------------------------

    def views(self) -> list[memoryview]:
        """The host memory still to be filled, in order; empty after `cancel`."""
        return self._parts[::-1]

    def advance(self, num_bytes: int) -> None:
        """Note that the first ``num_bytes`` of `views` have been filled."""
        self.left -= num_bytes
        self._on_progress()
        while num_bytes and self._parts:
            part = self._parts.pop()
            filled = part
            if part.nbytes > num_bytes:
                filled = part[:num_bytes]
                self._parts.append(part[num_bytes:])
            if self._digest is not None:
                start_s = time.perf_counter()
                self._digest.update(filled)
                self.digest_s += time.perf_counter() - start_s
            num_bytes -= filled.nbytes

    def write(self, data: memoryview) -> None:
        """Copy ``data`` into the next bytes. ValueError if it is larger than the rest. Ignored after `cancel`."""
        if self.cancelled:
            return
        if data.nbytes > self.left:
            raise ValueError(f"{data.nbytes} bytes for the last {self.left} of {self.size}")
        most = data.nbytes if self._digest is None else PIECE_BYTES
        while data.nbytes:
            target = self._parts[-1]
            if target.nbytes > (size := min(most, data.nbytes)):
                target = target[:size]
            # numpy releases the GIL for the copy; slice assignment does not.
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(data[: target.nbytes], dtype=np.uint8))
            data = data[target.nbytes :]
            self.advance(target.nbytes)

    def write_on_device(self, view: Callable[[Region], torch.Tensor], regions: Sequence[Region]) -> None:
        """Begin to copy the whole payload from ``regions`` of memory on the same device, whose bytes ``view`` returns.
        `settled` waits for the copies."""
        if not self.cancelled and isinstance(self._memory, DeviceMemory):
            self._memory.gather((ours, view(theirs)) for ours, theirs in pair_regions(self.regions, regions))
            self.advance(self.size)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which something writes the regions and cannot be cancelled; `at_rest` waits for it."""
        self.begin_writing()
        try:
            yield
        finally:
            self.end_writing()

    def begin_writing(self) -> None:
        """Enter `writing`, for a write that ends elsewhere."""
        self._writers += 1

    def end_writing(self) -> None:
        """Leave `writing`."""
        self._writers -= 1
        if not self._writers and self._resting is not None:
            self._resting.set()
            self._resting = None
