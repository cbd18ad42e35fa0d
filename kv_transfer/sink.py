"""Where a payload goes: parts of memory, filled in order by whichever transport brings the bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import xxhash

PIECE_BYTES = 2**20
"""Copies are hashed in pieces of this size, while they are still in the processor's cache."""


class Sink:
    """Takes ``size`` bytes into ``parts`` (host memory, contiguous each). Belongs to one event loop.

    With ``digest``, what has been filled is added to it at once; ``digest_s`` is the time that took. Once `close` was
    called nothing is written any more: whoever owns the memory may then give it to somebody else.
    """

    def __init__(self, parts: Sequence[memoryview], digest: xxhash.xxh3_64 | None = None) -> None:
        self._parts = [part.cast("B") for part in parts if part.nbytes]
        self._parts.reverse()
        self._digest = digest
        self.left = self.size = sum(part.nbytes for part in self._parts)
        self.digest_s = 0.0
        self.closed = False

    def views(self, limit: int = 2**62) -> list[memoryview]:
        """What is still to be filled, in order, of at most ``limit`` bytes; nothing once it is closed."""
        views: list[memoryview] = []
        for part in [] if self.closed else reversed(self._parts):
            views.append(part[:limit])
            limit -= views[-1].nbytes
            if not limit:
                break
        return views

    def advance(self, num_bytes: int) -> None:
        """The first so many bytes of `views` have been filled."""
        self.left -= num_bytes
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

    def write(self, data: memoryview) -> None:
        """Copy ``data`` in; ValueError if there is no room for so much. Ignored once it is closed."""
        if self.closed:
            return
        if data.nbytes > self.left:
            raise ValueError(f"{data.nbytes} bytes for the last {self.left} of {self.size}")
        source = np.frombuffer(data, dtype=np.uint8)
        most = source.size if self._digest is None else PIECE_BYTES
        while source.size:
            target = self._parts[-1][: min(most, source.size)]
            # numpy lets go of the GIL for the copy, slice assignment does not.
            np.copyto(np.frombuffer(target, dtype=np.uint8), source[: target.nbytes])
            source = source[target.nbytes :]
            self.advance(target.nbytes)

    def close(self) -> None:
        """Take nothing any more."""
        self.closed = True
        self._parts.clear()
