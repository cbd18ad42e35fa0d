"""A child process that exchanges messages with its parent and ends with it."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from experiments.messages import Message, line_of, message_of
from experiments.pairs.pair import PairFailed

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 12  # of the log's end, in an error
_END_S = 5.0
T = TypeVar("T")


class ChildProcess:
    """A module run by ``python`` with these arguments; ``label`` names it in errors. Its standard error goes to
    ``log``. It is expected to end when its input does."""

    def __init__(
        self, label: str, python: Path, module: str, *arguments: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._label = label
        self._log = log
        self._rest = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, timeout_s: float, command: Message, expected: type[T]) -> T:
        """Send a command and return its answer; raises as `send` and `receive` do."""
        self.send(command)
        return self.receive(timeout_s, expected)

    def send(self, command: Message) -> None:
        """Send a command; PairFailed if the process is gone."""
        try:
            self._stdin.write(line_of(command))
        except BrokenPipeError:
            raise self._ended() from None

    @overload
    def receive(self, timeout_s: float, expected: type[T]) -> T: ...

    @overload
    def receive(self, timeout_s: float, expected: Any) -> Any: ...

    def receive(self, timeout_s: float, expected: Any) -> Any:
        """The next message, of type ``expected`` or of a union of types. PairFailed if the process ended or timed out,
        WrongMessage if it sent anything else."""
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise PairFailed(f"{self._label} did not answer within {timeout_s:g} s{self.log_tail()}")
                chunk = os.read(self._stdout.fileno(), 2**16)
                if not chunk:
                    raise self._ended()
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return message_of(line, expected, self._label)

    def log_tail(self) -> str:
        """The end of its log with an introduction to it, or nothing if it is empty."""
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
        return "; its log ends with:\n" + "\n".join(lines) if lines else ""

    def close(self) -> None:
        """Let the process end, or kill it."""
        self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def _ended(self) -> PairFailed:
        try:
            status: int | str = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = "unknown: it closed its output only"
        return PairFailed(f"{self._label} ended (exit status {status}){self.log_tail()}")
