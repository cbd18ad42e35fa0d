"""What every peer is to a benchmark: two buffers, and a way for bytes to get from one into the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class PairUnavailable(RuntimeError):
    """This pair cannot run on this machine; the message says why. A benchmark reports it and goes on without."""


class PairFailed(RuntimeError):
    """A pair that did run gave up: a process of it ended, did not answer in time, or moved wrong bytes."""


class Pair(ABC):
    """Two processes (or one, for memcpy) that move bytes. Use as a context manager, which closes it in the end."""

    name: str
    """What a benchmark calls it in tables and results."""

    @abstractmethod
    def start(self, max_bytes: int) -> None:
        """Make source and target, with buffers of this size; PairUnavailable where this cannot run."""

    @abstractmethod
    def seconds(self, num_bytes: int) -> float:
        """One transfer of the buffers' first bytes, until all of them are in the target's memory. The first one of a
        size is checked too, outside its timed part; PairFailed if the bytes differ or a process gave up."""

    @abstractmethod
    def close(self) -> None:
        """End every process that was started and give the buffers back. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
