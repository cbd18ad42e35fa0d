"""The ceiling of every transport: one thread that copies memory."""

from __future__ import annotations

import ctypes
import time

from benchmarks.peers.buffer import Buffer
from benchmarks.peers.pair import Pair, PairFailed


class Memcpy(Pair):
    """libc's own memcpy between two buffers of this process."""

    name = "memcpy"

    def __init__(self) -> None:
        self._buffers: tuple[Buffer, Buffer] | None = None
        self._checked: set[int] = set()

    def start(self, max_bytes: int) -> None:
        """As `Pair` says; it runs anywhere."""
        self._buffers = (Buffer(max_bytes, filled=True), Buffer(max_bytes, filled=False))

    def seconds(self, num_bytes: int) -> float:
        """As `Pair` says."""
        if self._buffers is None:
            raise PairFailed(f"{self.name} was not started")
        source, target = self._buffers
        if num_bytes > source.array.nbytes:
            raise PairFailed(f"{self.name} has buffers of {source.array.nbytes} bytes only")
        checked = num_bytes in self._checked
        if not checked:
            target.clear(num_bytes)
        to_address, from_address = target.address, source.address
        started_s = time.perf_counter()
        ctypes.memmove(to_address, from_address, num_bytes)
        seconds = time.perf_counter() - started_s
        if not checked and source.digest(num_bytes) != target.digest(num_bytes):
            raise PairFailed(f"{self.name}: other bytes than the source's are in the target after {num_bytes} bytes")
        self._checked.add(num_bytes)
        return seconds

    def close(self) -> None:
        """As `Pair` says."""
        self._buffers = None
        self._checked.clear()
