"""The memory of a KV pool, as transports see it: a run of bytes on the host or on a GPU, addressed by `Region`.

Both kinds are used by the process that made the memory and by processes that opened it: the worker that maps its
engine's pool, and a peer on the same host that reads out of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pdserve.core import memory_file
from pdserve.core.errors import TransferRefused
from pdserve.core.kv_layout import Region

if TYPE_CHECKING:
    import torch

_PAGE = 4096


class HostMemory:
    """An anonymous memory file, mapped. ``writable``: this process owns it or is its engine's worker; a peer maps it
    for reading. ``fd`` is duplicated. TransferRefused if the file is empty, or if its size is not fixed."""

    on_device = False

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        if not memory_file.is_sealed(fd):
            raise TransferRefused("the memory file is not sealed against shrinking")
        self.size = os.fstat(fd).st_size
        if not self.size:
            raise TransferRefused("the memory file is empty")
        if writable:  # with its page table filled: otherwise the first hand-off into each block would pay for that
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
        """The bytes themselves. ValueError beyond the memory, or once it is closed."""
        offset, size = region
        return self._view[offset : offset + size]

    def touch(self) -> None:
        """Fault every page in, so that no transfer has to; without the GIL. About 80 ms per GB on the machines where it
        was measured."""
        np.frombuffer(self._view, dtype=np.uint8)[::_PAGE].max(initial=0)

    def close(self) -> None:
        """Unmap it, once the last view is dropped. Closing twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a view is still read; the mapping goes when the view does
                self._view.release()
                self._map.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class DeviceMemory:
    """Memory on a GPU: ``data`` are its bytes as a tensor of uint8, and ``handle`` is how other processes open it by
    CUDA IPC. This process computes nothing, so the device's default stream is for transfers alone."""

    on_device = True

    def __init__(self, handle: Sequence[Any], data: torch.Tensor) -> None:
        self.handle = list(handle)
        self.size = data.nbytes
        self.address = data.data_ptr()
        self._data: torch.Tensor | None = data

    @classmethod
    def create(cls, size: int, device: str) -> DeviceMemory:
        """``size`` zeros on ``device``; torch's OutOfMemoryError if there is no room."""
        import torch

        data = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls(data.untyped_storage()._share_cuda_(), data)  # type: ignore[no-untyped-call]

    @classmethod
    def open(cls, handle: Sequence[Any]) -> DeviceMemory:
        """Memory that another process shares. TransferRefused if it cannot be opened here."""
        import torch

        try:
            storage = torch.UntypedStorage._new_shared_cuda(*handle)
            device = torch.device("cuda", handle[0])
            return cls(handle, torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransferRefused(f"the peer's GPU memory cannot be opened: {error}") from None

    @property
    def index(self) -> int:
        """The number of its GPU in this process."""
        return self._open.device.index or 0

    def view(self, region: Region) -> torch.Tensor:
        """The bytes themselves. ValueError once it is closed."""
        offset, size = region
        return self._open[offset : offset + size]

    def staging(self, size: int) -> memoryview:
        """Host memory from and to which the device copies quickly."""
        import torch

        staged: memoryview = torch.empty(size, dtype=torch.uint8, pin_memory=self._open.is_cuda).numpy().data
        return staged

    def copy(self, regions: Sequence[Region], staged: memoryview, *, to_device: bool) -> None:
        """Begin to copy between the regions and ``staged``, which holds them one after the other; see `settled`."""
        if not regions:
            return
        import torch

        host, start = torch.frombuffer(staged, dtype=torch.uint8), 0
        for region in regions:
            ours, theirs = self.view(region), host[start : start + region.size]
            target, source = (ours, theirs) if to_device else (theirs, ours)
            target.copy_(source, non_blocking=True)
            start += region.size

    def settled(self) -> Callable[[], bool]:
        """Asks whether the copies begun so far have ended, without waiting for them."""
        if not self._open.is_cuda:  # a tensor on the host, as tests have it
            return lambda: True
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._open.device))
        return event.query

    def close(self) -> None:
        """Let go of it. Closing twice is fine."""
        self._data = None

    @property
    def _open(self) -> torch.Tensor:
        if self._data is None:
            raise ValueError("the memory is closed")
        return self._data


Memory: TypeAlias = HostMemory | DeviceMemory
"""What a pool lies in."""
