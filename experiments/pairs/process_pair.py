"""A pair of two child processes, one with the source and one with the target."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from experiments.pairs.child_process import ChildProcess
from experiments.pairs.endpoint import (
    Clear,
    Connect,
    Digest,
    Digested,
    Done,
    Expecting,
    Move,
    Moved,
    Ready,
    Unavailable,
)
from experiments.pairs.pair import Pair, PairUnavailable

TIMEOUT_S = 60.0
_PROBE_BYTES = 4096


class ProcessPair(Pair):
    """Runs ``module`` (an `Endpoint`) twice. By default this Python does, and the source pushes."""

    module: str
    probe = True
    """Whether a small transfer at the start has to show that it works."""
    environment: Mapping[str, str] = {}
    """Environment variables of both processes."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._children: tuple[ChildProcess, ChildProcess] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of source and target, while they run."""
        return tuple(child.pid for child in self._children or ())

    def _open(self, max_bytes: int) -> None:
        """Both processes, connected."""
        python = self._python()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        source = self._child(python, "source", max_bytes, folder)
        target = self._child(python, "target", max_bytes, folder)
        self._children = (source, target)
        source_address, target_address = (self._address(child) for child in self._children)
        source.send(Connect(target_address))  # both at once: either may need the other's answers
        target.send(Connect(source_address))
        source.receive(TIMEOUT_S, Done)
        target.receive(TIMEOUT_S, Done)
        if self.probe:
            self.seconds(min(max_bytes, _PROBE_BYTES))

    def _move(self, num_bytes: int) -> float:
        return self._transfer(*self._both(), num_bytes)

    def _clear_target(self, num_bytes: int) -> None:
        _, target = self._both()
        target.ask(TIMEOUT_S, Clear(num_bytes), Done)

    def _digests(self, num_bytes: int) -> tuple[str, str]:
        source, target = (child.ask(TIMEOUT_S, Digest(num_bytes), Digested).digest for child in self._both())
        return source, target

    def _close(self) -> None:
        self._children = None
        self._stack.close()

    def _both(self) -> tuple[ChildProcess, ChildProcess]:
        assert self._children is not None, "the base class asks for transfers of started pairs only"
        return self._children

    def _python(self) -> Path:
        """The interpreter of both processes; PairUnavailable if there is none."""
        return Path(sys.executable)

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds of one transfer: from before the source's first act until the target has everything. Both read the
        same clock."""
        target.send(Move(num_bytes))
        target.receive(TIMEOUT_S, Expecting)
        started_s = source.ask(TIMEOUT_S, Move(num_bytes), Moved).seconds
        return target.receive(TIMEOUT_S, Moved).seconds - started_s

    def _child(self, python: Path, role: str, max_bytes: int, folder: Path) -> ChildProcess:
        child = ChildProcess(
            f"{self.name}'s {role}",
            python,
            self.module,
            role,
            str(max_bytes),
            log=folder / f"{role}.log",
            environment=self.environment,
        )
        self._stack.callback(child.close)
        return child

    def _address(self, child: ChildProcess) -> msgspec.Raw:
        answer: Ready | Unavailable = child.receive(TIMEOUT_S, Ready | Unavailable)
        if isinstance(answer, Unavailable):
            raise PairUnavailable(f"{answer.reason}{child.log_tail()}")
        return answer.address
