"""The memory that bytes are moved from and to, the same for every peer."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


class Buffer:
    """``num_bytes`` of memory with all its pages there already. ``filled``: with random bytes, else with zeros."""

    def __init__(self, num_bytes: int, *, filled: bool) -> None:
        self.array: npt.NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)
        if filled:
            words = np.random.default_rng().integers(0, 2**64, -(-num_bytes // 8), dtype=np.uint64)
            self.array[:] = words.view(np.uint8)[:num_bytes]
        else:
            self.array[:] = 0

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.array.ctypes.data

    @property
    def view(self) -> memoryview:
        """All of it, to be read and written."""
        return self.array.data

    def clear(self, num_bytes: int) -> None:
        """Zero the first bytes."""
        self.array[:num_bytes] = 0

    def digest(self, num_bytes: int) -> str:
        """Of the first bytes, in hexadecimal."""
        return hashlib.sha256(self.view[:num_bytes]).hexdigest()
