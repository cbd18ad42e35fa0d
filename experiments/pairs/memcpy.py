"""The ceiling of every transport: one thread that copies memory."""

from __future__ import annotations

import ctypes
import time

from experiments.pairs.buffer import Buffer
from experiments.pairs.pair import Pair


class Memcpy(Pair):
    """libc's own memcpy between two buffers of this process."""

    name = "memcpy"

    def _open(self, max_bytes: int) -> None:
        self._source, self._target = Buffer(max_bytes, filled=True), Buffer(max_bytes, filled=False)

    def _move(self, num_bytes: int) -> float:
        target_address, source_address = self._target.address, self._source.address
        started_s = time.perf_counter()
        ctypes.memmove(target_address, source_address, num_bytes)
        return time.perf_counter() - started_s

    def _clear_target(self, num_bytes: int) -> None:
        self._target.clear(num_bytes)

    def _digests(self, num_bytes: int) -> tuple[str, str]:
        return self._source.digest(num_bytes), self._target.digest(num_bytes)

    def _close(self) -> None:
        self._source = self._target = Buffer(0, filled=False)
