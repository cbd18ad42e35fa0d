"""A pool in an anonymous memory file, which a peer on the same host may map and read."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from kv_transfer.base import Buffer
from pdserve.core.errors import TransferRefused
from pdserve.core.memory_file import is_sealed

_PAGE = 4096


class SharedMemory:
    """This process's own mapping ``view`` of the sealed memory file ``fd``, both of which stay their owner's."""

    def __init__(self, fd: int, view: memoryview) -> None:
        self.fd = fd
        self.address = address_of(view) if view.nbytes else 0
        """Where the mapping starts in this process."""
        self.size = view.nbytes

    def offset(self, part: Buffer) -> int | None:
        """Where ``part`` (not empty) begins in the file; None if it lies elsewhere (then it has to be sent)."""
        if not isinstance(part, memoryview) or part.readonly:
            return None
        offset = address_of(part) - self.address
        return offset if 0 <= offset <= self.size - part.nbytes else None


class PeerMemory:
    """A peer's memory file, mapped for reading. ``fd`` stays the caller's."""

    def __init__(self, fd: int) -> None:
        """`TransferRefused` if its size is not fixed."""
        if not is_sealed(fd):
            raise TransferRefused("the peer's memory file is not sealed against shrinking")
        self.size = os.fstat(fd).st_size
        if not self.size:
            raise TransferRefused("the peer's memory file is empty")
        self._map = mmap.mmap(fd, self.size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)

    def touch(self) -> None:
        """Fault every page in, so that no transfer has to; without the GIL. Some 80 ms per GB, where it was timed."""
        np.frombuffer(self._view, dtype=np.uint8)[::_PAGE].max(initial=0)

    def view(self, offset: int, size: int) -> memoryview:
        """A part of it, which must not reach beyond."""
        return self._view[offset : offset + size]

    def finish(self) -> None:
        """Copies out of it are done when they return."""

    def close(self) -> None:
        """Unmap it (once the last view is dropped). Closing twice is fine."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


def address_of(part: memoryview) -> int:
    """Where writable memory begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(part))
