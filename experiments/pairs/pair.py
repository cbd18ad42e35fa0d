"""The interface of all peers: two buffers, and a way to transfer bytes from one to the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from experiments.messages import WrongMessage


class PairUnavailable(RuntimeError):
    """The pair cannot run on this machine; the message says why. Benchmarks report it and skip the pair."""


class PairFailed(RuntimeError):
    """A running pair failed: a process ended, timed out, or transferred wrong bytes."""


class Pair(ABC):
    """Two processes (or one, for memcpy) that move bytes. Use as a context manager, which closes it in the end."""

    name: str
    """What a benchmark calls it in tables and results."""

    def __init__(self) -> None:
        self._max_bytes = 0
        self._checked: set[int] = set()

    def start(self, max_bytes: int) -> None:
        """Make source and target, with buffers of this size; PairUnavailable where this cannot run, PairFailed or
        WrongMessage if it does not. Nothing is left running then."""
        self._max_bytes = max_bytes
        try:
            self._open(max_bytes)
        except (PairFailed, PairUnavailable, WrongMessage):
            self.close()
            raise

    def seconds(self, num_bytes: int) -> float:
        """One transfer of the buffers' first bytes, until all of them are in the target's memory. The first one of a
        size is checked too, outside its timed part; PairFailed if the bytes differ or a process gave up, WrongMessage
        if one did not send what was expected."""
        if not 0 < num_bytes <= self._max_bytes:
            raise PairFailed(f"{self.name} cannot move {num_bytes} bytes: its buffers have {self._max_bytes}")
        if num_bytes in self._checked:
            return self._move(num_bytes)
        self._clear_target(num_bytes)
        seconds = self._move(num_bytes)
        source_digest, target_digest = self._digests(num_bytes)
        if source_digest != target_digest:
            raise PairFailed(f"{self.name} moved {num_bytes} bytes, and the target has others than the source")
        self._checked.add(num_bytes)
        return seconds

    def close(self) -> None:
        """End every process that was started and give the buffers back. May be called again."""
        self._max_bytes = 0
        self._checked.clear()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _open(self, max_bytes: int) -> None:
        """As `start`; `_close` follows where it fails."""

    @abstractmethod
    def _move(self, num_bytes: int) -> float:
        """One transfer, in seconds."""

    @abstractmethod
    def _clear_target(self, num_bytes: int) -> None:
        """Zero the target's first bytes."""

    @abstractmethod
    def _digests(self, num_bytes: int) -> tuple[str, str]:
        """Of the first bytes of source and target."""

    @abstractmethod
    def _close(self) -> None:
        """As `close`."""
