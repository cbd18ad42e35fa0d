"""Where a payload goes: parts of memory, filled in order by whichever transport brings the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

Stretch = Any
"""A stretch of memory: a memoryview of bytes on the host, or a tensor of uint8 with one dimension on a device."""

PIECE_BYTES = 2**20
"""Copies are hashed in pieces of this size, while they are still in the processor's cache."""


class Sink:
    """Takes ``size`` bytes into ``parts`` (host memory, contiguous each, or tensors of bytes on a device). Belongs to
    one event loop.

    With ``digest`` (host memory only), what has been filled is added to it at once; ``digest_s`` is the time that took.
    ``on_progress`` is called whenever something was filled. Once `close` was called nothing is written any more, and
    whoever owns the memory may give it to somebody else.
    """

    def __init__(
        self,
        parts: Sequence[Stretch],
        digest: xxhash.xxh3_64 | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts = [part.cast("B") if isinstance(part, memoryview) else part for part in parts if part.nbytes]
        self._parts.reverse()
        self._digest, self._on_progress = digest, on_progress
        self.left = self.size = sum(part.nbytes for part in self._parts)
        self.digest_s = 0.0
        self.closed = False

    def views(self) -> list[memoryview]:
        """What is still to be filled, in order, of host memory; nothing once it is closed."""
        return [] if self.closed else [part for part in reversed(self._parts) if isinstance(part, memoryview)]

    def advance(self, num_bytes: int) -> None:
        """The first so many bytes of `views` have been filled."""
        self.left -= num_bytes
        self._on_progress()
        while num_bytes:
            part = self._parts.pop()
            filled, rest = part[:num_bytes], part[num_bytes:]
            if rest.nbytes:
                self._parts.append(rest)
            if self._digest is not None:
                start_s = time.perf_counter()
                self._digest.update(filled)
                self.digest_s += time.perf_counter() - start_s
            num_bytes -= filled.nbytes

    def write(self, data: Stretch) -> None:
        """Copy ``data`` in, which is of the parts' kind (between tensors the device is not waited for); ValueError if
        there is no room for so much. Ignored once it is closed."""
        if self.closed:
            return
        if data.nbytes > self.left:
            raise ValueError(f"{data.nbytes} bytes for the last {self.left} of {self.size}")
        most = data.nbytes if self._digest is None else PIECE_BYTES
        while data.nbytes:
            target = self._parts[-1][: min(most, data.nbytes)]
            _copy(target, data[: target.nbytes])
            data = data[target.nbytes :]
            self.advance(target.nbytes)

    def close(self) -> None:
        """Take nothing any more."""
        self.closed = True
        self._parts.clear()


def _copy(target: Stretch, source: Stretch) -> None:
    if isinstance(target, memoryview):
        # numpy lets go of the GIL for the copy, slice assignment does not.
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    else:
        target.copy_(source, non_blocking=True)
