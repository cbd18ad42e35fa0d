"""The memory that bytes are moved from and to, the same for every peer."""

from __future__ import annotations

import hashlib
import mmap
import os

import numpy as np
import numpy.typing as npt

MEMORY_VARIABLE = "PEERS_MEMORY"
"""``private``: a process's own memory, in huge pages where the kernel has them. Else a memory file, as it has to be
where two processes (an engine and what serves its transfers) share a pool; the kernel gives those small pages as a
rule."""


class Buffer:
    """``num_bytes`` of memory whose pages are all present. ``filled``: with random bytes, else with zeros."""

    def __init__(self, num_bytes: int, *, filled: bool) -> None:
        self.array = _private(num_bytes) if os.environ.get(MEMORY_VARIABLE) == "private" else _shared(num_bytes)
        if filled:
            words = np.random.default_rng().integers(0, 2**64, -(-num_bytes // 8), dtype=np.uint64)
            self.array[:] = words.view(np.uint8)[:num_bytes]
        else:
            self.array[:] = 0

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.array.ctypes.data

    @property
    def view(self) -> memoryview:
        """The whole buffer, readable and writable."""
        return self.array.data

    def clear(self, num_bytes: int) -> None:
        """Zero the first bytes."""
        self.array[:num_bytes] = 0

    def digest(self, num_bytes: int) -> str:
        """Digest of the first bytes, in hexadecimal."""
        return hashlib.sha256(self.view[:num_bytes]).hexdigest()


def _private(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(num_bytes, dtype=np.uint8)


def _shared(num_bytes: int) -> npt.NDArray[np.uint8]:
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, max(num_bytes, 1))
    try:
        return np.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=np.uint8)[:num_bytes]
    finally:
        os.close(fd)
