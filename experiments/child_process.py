"""A child process that exchanges messages with its parent and ends with it."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from experiments.messages import Message, line_of, message_of

ROOT = Path(__file__).resolve().parents[1]
_LOG_LINES = 12  # of the log's end, in an error
_END_S = 5.0
T = TypeVar("T")


class ChildFailed(RuntimeError):
    """A process ended, did not answer in time, or did not do what it was to do."""


class ChildProcess:
    """A module run by ``python`` with these arguments, as a context manager, which ends it. ``label`` names it in
    errors, which quote the end of its standard error."""

    def __init__(
        self,
        label: str,
        module: str,
        *arguments: str,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._label = label
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._rest = b""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [str(python), "-P", "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def ask(self, timeout_s: float, command: Message, expected: type[T]) -> T:
        """Send a command and return its answer; raises as `send` and `receive` do."""
        self.send(command)
        return self.receive(timeout_s, expected)

    def send(self, command: Message) -> None:
        """Send a command; ChildFailed if the process is gone."""
        try:
            self._stdin.write(line_of(command))
        except BrokenPipeError:
            raise self._ended() from None

    def end_input(self) -> None:
        """Close its input."""
        self._stdin.close()

    @overload
    def receive(self, timeout_s: float | None, expected: type[T]) -> T: ...

    @overload
    def receive(self, timeout_s: float | None, expected: Any) -> Any: ...

    def receive(self, timeout_s: float | None, expected: Any) -> Any:
        """The next message, of type ``expected`` or of a union of types. ChildFailed if the process ended or timed out,
        WrongMessage if it sent anything else."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                if not selector.select(left_s):
                    raise ChildFailed(f"{self._label} did not answer within {timeout_s:g} s{self.log_tail()}")
                chunk = os.read(self._stdout.fileno(), 2**16)
                if not chunk:
                    raise self._ended()
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return message_of(line, expected, self._label)

    def log_tail(self) -> str:
        """The end of its log with an introduction to it, or nothing if it is empty."""
        said = os.pread(self._log.fileno(), 2**20, max(0, os.fstat(self._log.fileno()).st_size - 2**20))
        lines = said.decode(errors="replace").strip().splitlines()[-_LOG_LINES:]
        return "; its log ends with:\n" + "\n".join(lines) if lines else ""

    def close(self) -> None:
        """End the process; kill it if it takes long."""
        self._stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> ChildFailed:
        try:
            status: int | str = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = "unknown: it closed its output only"
        return ChildFailed(f"{self._label} ended (exit status {status}){self.log_tail()}")
