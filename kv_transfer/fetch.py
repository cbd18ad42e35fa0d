"""Bytes on their way out of a pool (`Payload`), and into one (`Fetch`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from pdserve.core.kv_layout import Region, pair_regions

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 2**20
"""Copies are hashed in pieces of this size, while they are still in the processor's cache."""

_POLL_S = 50e-6  # between two questions to a device


class Payload:
    """What a message carries: ``size`` bytes of the sender's ``memory``, which are its ``regions``; without ``memory``
    they were staged on the host, or lie in no pool."""

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
        """The bytes on the host, one part after the other. Empty for memory on a device that was not staged."""
        if self._parts is None:
            memory = self.memory
            self._parts = [memory.view(region) for region in self.regions] if isinstance(memory, HostMemory) else ()
        return self._parts


async def staged(memory: DeviceMemory, regions: Sequence[Region]) -> Payload:
    """A payload of copies on the host. ValueError if the memory is closed."""
    copies = memory.staging(sum(region.size for region in regions))
    memory.copy(regions, copies, to_device=False)
    await settled(memory)
    return Payload(None, (), [copies])


async def settled(memory: Memory) -> None:
    """Return once the copies begun so far from and to a device have ended. Other tasks of the loop run meanwhile."""
    if isinstance(memory, DeviceMemory):
        have_ended = memory.settled()
        while not have_ended():  # noqa: ASYNC110 - a device has nothing else to wait on that does not block
            await asyncio.sleep(_POLL_S)


class Fetch:
    """The payload of a link's last message on its way into ``regions`` of this end's memory, which have its size.
    Belongs to one event loop.

    Awaiting it moves the bytes, and returns early if it is cancelled by another task; PeerLost if the rest does not
    come. `commit` then brings to the device what was staged on the host. Once `cancel` was called nothing is begun any
    more, and once `at_rest` has returned nothing writes the regions any more.

    ``digest`` is the hash of what has been filled so far, if ``hashed``, and ``digest_s`` the time that took.
    ``on_progress`` is called whenever something was filled.
    """

    def __init__(
        self,
        memory: Memory,
        regions: Sequence[Region],
        move: Callable[[Fetch], Coroutine[Any, Any, None]],
        *,
        on_device: bool,
        hashed: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.regions, self.cancelled, self.digest_s = regions, False, 0.0
        self.digest = xxhash.xxh3_64() if hashed else None
        self._memory, self._move, self._on_progress = memory, move, on_progress
        self._staged: memoryview | None = None
        self._parts: list[memoryview] = []  # of host memory, still to be filled: the next is the last
        self.size = 0
        for region in regions:
            self.size += region.size
        self.left = self.size
        if isinstance(memory, HostMemory):
            self._parts = [memory.view(region) for region in reversed(regions)]
        elif not on_device:
            self._staged = memory.staging(self.size)
            self._parts = [self._staged]
        self._writers = 0
        self._resting: asyncio.Event | None = None

    def __await__(self) -> Generator[Any, None, None]:
        return self._move(self).__await__()

    async def commit(self) -> None:
        """Bring what was staged on the host to the device, and wait for all copies."""
        if isinstance(self._memory, DeviceMemory) and not self.cancelled:
            with self.writing():
                if self._staged is not None:
                    self._memory.copy(self.regions, self._staged, to_device=True)
                await settled(self._memory)

    def cancel(self) -> None:
        """Take nothing any more. Cancelling twice is fine, and so is cancelling after the end."""
        self.cancelled = True
        self._parts.clear()

    async def at_rest(self) -> None:
        """Return once nothing writes the regions any more. Unbounded: a read that is under way cannot be called back,
        and its regions must not be used for anything else before it has ended."""
        while self._writers:
            if self._resting is None:
                self._resting = asyncio.Event()
            await self._resting.wait()

    # --- for the transports ------------------------------------------------------------------------------------------

    def views(self) -> list[memoryview]:
        """What is still to be filled, in order, of host memory; nothing once it is cancelled."""
        return self._parts[::-1]

    def advance(self, num_bytes: int) -> None:
        """The first so many bytes of `views` have been filled."""
        self.left -= num_bytes
        self._on_progress()
        while num_bytes and self._parts:
            part = self._parts.pop()
            filled = part
            if part.nbytes > num_bytes:
                filled = part[:num_bytes]
                self._parts.append(part[num_bytes:])
            if self.digest is not None:
                start_s = time.perf_counter()
                self.digest.update(filled)
                self.digest_s += time.perf_counter() - start_s
            num_bytes -= filled.nbytes

    def write(self, data: memoryview) -> None:
        """Copy ``data`` in. ValueError if there is no room for so much. Ignored once it is cancelled."""
        if self.cancelled:
            return
        if data.nbytes > self.left:
            raise ValueError(f"{data.nbytes} bytes for the last {self.left} of {self.size}")
        most = data.nbytes if self.digest is None else PIECE_BYTES
        while data.nbytes:
            target = self._parts[-1]
            if target.nbytes > (size := min(most, data.nbytes)):
                target = target[:size]
            # numpy releases the GIL for the copy, slice assignment does not.
            np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(data[: target.nbytes], dtype=np.uint8))
            data = data[target.nbytes :]
            self.advance(target.nbytes)

    def write_on_device(self, view: Callable[[Region], torch.Tensor], regions: Sequence[Region]) -> None:
        """Copy everything from ``regions`` of memory on the same device, of which ``view`` gives the bytes. The copies
        may go on after this: see `settled`."""
        if not self.cancelled and isinstance(self._memory, DeviceMemory):
            for ours, theirs in pair_regions(self.regions, regions):
                self._memory.view(ours).copy_(view(theirs), non_blocking=True)
            self.advance(self.size)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Something writes the regions that cannot be stopped at once: see `at_rest`."""
        self.begin_writing()
        try:
            yield
        finally:
            self.end_writing()

    def begin_writing(self) -> None:
        """As `writing`, for what does not end where it begins."""
        self._writers += 1

    def end_writing(self) -> None:
        """It has ended."""
        self._writers -= 1
        if not self._writers and self._resting is not None:
            self._resting.set()
            self._resting = None
