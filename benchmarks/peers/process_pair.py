"""A pair of two child processes, one with the source and one with the target."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.child_process import ChildProcess
from benchmarks.peers.pair import Pair, PairFailed, PairUnavailable

TIMEOUT_S = 60.0
_PROBE_BYTES = 4096


class ProcessPair(Pair):
    """Runs ``module`` (an `Endpoint`) twice. A subclass says which Python runs it and how a transfer goes."""

    module: str
    environment: Mapping[str, str] = {}
    """Environment variables of both processes."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._source: ChildProcess | None = None
        self._target: ChildProcess | None = None
        self._checked: set[int] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of source and target, while they run."""
        return tuple(child.pid for child in (self._source, self._target) if child is not None)

    def start(self, max_bytes: int) -> None:
        """Both processes, connected; a small transfer shows that they can do it. PairUnavailable if a process says
        that it cannot run here, PairFailed if it just does not; nothing is left running then."""
        python = self._python()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
            self._source = self._child(python, "source", max_bytes, folder)
            self._target = self._child(python, "target", max_bytes, folder)
            source_address, target_address = (self._address(child) for child in (self._source, self._target))
            self._source.ask(TIMEOUT_S, connect=target_address)
            self._target.ask(TIMEOUT_S, connect=source_address)
            self.seconds(min(max_bytes, _PROBE_BYTES))
        except (PairFailed, PairUnavailable):
            self.close()
            raise

    def seconds(self, num_bytes: int) -> float:
        """As `Pair` says."""
        if self._source is None or self._target is None:
            raise PairFailed(f"{self.name} was not started")
        if num_bytes in self._checked:
            return self._transfer(self._source, self._target, num_bytes)
        self._target.ask(TIMEOUT_S, clear=num_bytes)
        seconds = self._transfer(self._source, self._target, num_bytes)
        sent, got = (child.ask(TIMEOUT_S, digest=num_bytes)["digest"] for child in (self._source, self._target))
        if sent != got:
            raise PairFailed(f"{self.name}: other bytes than the source's are in the target after {num_bytes} bytes")
        self._checked.add(num_bytes)
        return seconds

    def close(self) -> None:
        """As `Pair` says."""
        self._stack.close()
        self._source = self._target = None
        self._checked.clear()

    def _python(self) -> Path:
        """The interpreter of both processes; PairUnavailable if there is none."""
        return Path(sys.executable)

    def _transfer(self, source: ChildProcess, target: ChildProcess, num_bytes: int) -> float:
        """Seconds of one transfer; by default the target reads, and measures it."""
        return float(target.ask(TIMEOUT_S, bytes=num_bytes)["seconds"])

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

    def _address(self, child: ChildProcess) -> dict[str, Any]:
        answer = child.receive(TIMEOUT_S)
        if "unavailable" in answer:
            raise PairUnavailable(f"{answer['unavailable']}{child.log_tail()}")
        address: dict[str, Any] = answer["address"]
        return address
