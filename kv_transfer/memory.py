"""The memory of a KV pool: contiguous bytes on the host or on a GPU, addressed by `Region`.

A process either created the memory or opened it: a worker opens the pool of its engine, and that of a peer on the same
host, which it only reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pdserve.core.errors import TransferRefused
from pdserve.core.kv_layout import Region
from runtime import memory_file
from runtime.poison import ends_if_poisoned

if TYPE_CHECKING:
    import torch

    from runtime.cuda import Cuda

_PAGE = 4096
_WORD = 8  # bytes
_ROW_WORDS = 2**12
_MIX = 0x2545F4914F6CDD1D  # odd


class HostMemory:
    """A mapped anonymous memory file. ``fd`` is duplicated. A peer's file is mapped with ``writable`` False.
    TransferRefused if the file is empty or not sealed against shrinking."""

    on_device = False

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        if not memory_file.is_sealed(fd):
            raise TransferRefused("the memory file is not sealed against shrinking")
        self.size = os.fstat(fd).st_size
        if not self.size:
            raise TransferRefused("the memory file is empty")
        if writable:  # populated, so that the first hand-off into a block causes no page faults
            self._map = mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        else:
            self._map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self.fd = os.dup(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) if writable else 0
        """Where a writable mapping starts in this process."""

    @classmethod
    def create(cls, size: int) -> HostMemory:
        """A new memory file of ``size`` zeros."""
        fd = memory_file.create("pdserve-kv")
        try:
            os.ftruncate(fd, size)
            memory_file.seal(fd)
            return cls(fd)
        finally:
            os.close(fd)

    def view(self, region: Region) -> memoryview:
        """The bytes of a region, without a copy. ValueError if the memory is closed."""
        offset, size = region
        return self._view[offset : offset + size]

    def touch(self) -> None:
        """Fault every page in, so that no transfer has to. Releases the GIL; takes about 80 ms per GB."""
        np.frombuffer(self._view, dtype=np.uint8)[::_PAGE].max(initial=0)

    def close(self) -> None:
        """Unmap the file when its last view is dropped. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a view is in use, and keeps the mapping
                self._view.release()
                self._map.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class DeviceMemory:
    """Memory on a GPU. ``data`` is a tensor of its bytes (uint8), and ``handle`` opens it in other processes by CUDA
    IPC.

    ``cuda`` has allocated or opened it on GPU ``index`` (None: the tensor is on the host, in tests). Copies use the
    device's default stream, on which this process runs nothing else."""

    on_device = True

    def __init__(
        self, handle: Sequence[Any], data: torch.Tensor, cuda: Cuda | None = None, index: int | None = None
    ) -> None:
        self.handle = list(handle)
        self.cuda = cuda
        self.index = (data.device.index or 0) if index is None else index
        """The index of the GPU in this process."""
        self.size = data.nbytes
        self.address = data.data_ptr()
        self._data: torch.Tensor | None = data
        self._weights: torch.Tensor | None = None  # of `digest`
        self.imported = False
        """Whether another process has allocated it. NIXL cannot register such memory: CUDA's handles for other
        processes, and RDMA, are documented for the process that has allocated."""

    @classmethod
    def create(cls, size: int, device: str, cuda: Cuda | None = None) -> DeviceMemory:
        """Allocate ``size`` zeros on ``device`` (``cuda``, ``cuda:1``). torch's OutOfMemoryError if there is no
        room."""
        cuda, index = cuda or _torch_cuda(), int(device.partition(":")[2] or 0)
        cuda.init(index)
        data = cuda.zeros(size, index)
        return cls(cuda.share(data), data, cuda, index)

    @classmethod
    def open(cls, handle: Sequence[Any], index: int | None = None, cuda: Cuda | None = None) -> DeviceMemory:
        """Open memory that another process shares. ``index`` is its GPU's in this process, if processes may number
        GPUs differently. TransferRefused if that fails."""
        cuda = cuda or _torch_cuda()
        at: int = handle[0] if index is None else index
        try:
            cuda.init(at)  # opening memory does not, and crashes without
            opened = cls(handle, cuda.open(handle, at), cuda, at)
            opened.imported = True
            return opened
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransferRefused(f"the peer's GPU memory cannot be opened: {error}") from None

    def again(self) -> DeviceMemory:
        """The same memory, which stays when the result is closed. ValueError if it is closed."""
        return DeviceMemory(self.handle, self._open, self.cuda, self.index)

    def view(self, region: Region) -> torch.Tensor:
        """The bytes of a region, without a copy. ValueError if the memory is closed."""
        offset, size = region
        return self._open[offset : offset + size]

    def staging(self, size: int) -> memoryview:
        """Pinned host memory of ``size`` bytes."""
        import torch

        staged: memoryview = torch.empty(size, dtype=torch.uint8, pin_memory=self._open.is_cuda).numpy().data
        return staged

    def copy(self, regions: Sequence[Region], staged: memoryview, *, to_device: bool) -> None:
        """Begin to copy between the regions and ``staged``, which holds them in order. See `settled`."""
        if not regions:
            return
        import torch

        host, start = torch.frombuffer(staged, dtype=torch.uint8), 0
        for region in regions:
            ours, theirs = self.view(region), host[start : start + region.size]
            target, source = (ours, theirs) if to_device else (theirs, ours)
            with ends_if_poisoned():
                target.copy_(source, non_blocking=True)
            start += region.size

    def gather(self, pairs: Iterable[tuple[Region, torch.Tensor]]) -> None:
        """Begin to copy tensors of the same device into the regions, all by a few kernels. See `settled`."""
        import torch

        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for region, source in pairs:
            targets.append(self.view(region))
            sources.append(source)
        if not targets:
            return
        if all(each.nbytes % _WORD == each.data_ptr() % _WORD == 0 for each in (*targets, *sources)):
            # A kernel moves an element of this size as fast as a byte.
            targets, sources = ([each.view(torch.int64) for each in some] for some in (targets, sources))
        with ends_if_poisoned():
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def digest(self, regions: Sequence[Region]) -> Callable[[], bytes]:
        """Begin to hash the bytes of the regions, at most 128 MiB, as one sequence, on the device. Returns what reads
        the hash, of 8 bytes, once that is `settled`.

        The bytes are words of a matrix, whose rows are summed with odd weights modulo 2**64, mixed, and summed in the
        same way. So a change of one row always changes the hash, and another one does with a probability of 1 in 2**64
        or so. It is no protection against who would forge bytes."""
        import torch

        with ends_if_poisoned():
            whole = torch.cat([self.view(region) for region in regions] or [self._open[:0]])
            rows = -(-whole.nbytes // (_WORD * _ROW_WORDS)) or 1
            padded = torch.zeros(rows * _ROW_WORDS * _WORD, dtype=torch.uint8, device=whole.device)
            padded[: whole.nbytes] = whole
            if self._weights is None:
                self._weights = torch.from_numpy(_weights()).to(whole.device)
            sums = (padded.view(torch.int64).view(rows, _ROW_WORDS) * self._weights).sum(dim=1)
            sums = (sums ^ (sums >> 32)) * _MIX
            total = ((sums ^ (sums >> 29)) * self._weights[:rows]).sum()

        def read() -> bytes:
            with ends_if_poisoned():
                return int(total).to_bytes(8, "little", signed=True)

        return read

    def settled(self) -> Callable[[], bool]:
        """Return a function that tells whether the copies begun so far have ended."""
        if self.cuda is None:
            return lambda: True
        with ends_if_poisoned():
            event = self.cuda.record(self.index)

        def passed() -> bool:
            with ends_if_poisoned():
                return event.query()

        return passed

    def synchronize(self) -> None:
        """Wait until the device has done all that this process has begun. Blocks."""
        if self.cuda is not None:
            self.cuda.init(self.index)  # of this thread
            self.cuda.synchronize(self.index)

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self._data = None

    @property
    def _open(self) -> torch.Tensor:
        if self._data is None:
            raise ValueError("the memory is closed")
        return self._data


def _weights() -> np.ndarray:
    """Odd numbers, ``[_ROW_WORDS]``, int64: those of SplitMix64, so that all versions of all libraries agree."""
    state = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def _torch_cuda() -> Cuda:
    from runtime.cuda import Cuda  # imports torch, which a worker without a GPU may do without

    return Cuda()


Memory: TypeAlias = HostMemory | DeviceMemory
"""The memory of a pool."""
