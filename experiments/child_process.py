"""A child process that exchanges messages with its parent and ends with it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import psutil

from experiments.messages import Done, Message, line_of, message_of
from ops.launch.leftovers import end_processes

ROOT = Path(__file__).resolve().parents[1]
_LOG_LINES = 12  # of the log's end, in an error
_END_S, _FAMILY_END_S = 15.0, 5.0
T = TypeVar("T")


class ChildFailed(RuntimeError):
    """A process ended, did not answer in time, or did not do what it was to do."""


def program(module: str, *arguments: str, python: Path = Path(sys.executable)) -> list[str]:
    """The command that runs a module."""
    return [str(python), "-P", "-m", module, *arguments]


def call(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that calls a function of a module with arguments that JSON can carry (`ChildProcess.result`)."""
    where = f"{function.__module__}:{function.__name__}"
    return program("experiments.call", where, msgspec.json.encode(arguments).decode())


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """A command in a session of its own, as a context manager, which ends it with its children. ``label`` names it in
    errors, which quote the end of its standard error. That goes to the file ``log``, or to a temporary one; so does the
    standard output of one that does not talk in messages."""

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        *,
        talks: bool = True,
    ) -> None:
        self._label, self._rest = label, b""
        self._log = log.open("w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else self._log,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the parent's, which decides what ends
        )
        self.pid = self._process.pid

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
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line_of(command))
        except BrokenPipeError:
            raise self._ended() from None

    def end_input(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @overload
    def receive(self, timeout_s: float | None, expected: type[T]) -> T: ...

    @overload
    def receive(self, timeout_s: float | None, expected: Any) -> Any: ...

    def receive(self, timeout_s: float | None, expected: Any) -> Any:
        """The next message, of type ``expected`` or of a union of types. ChildFailed if the process ended or timed out,
        WrongMessage if it sent anything else."""
        assert self._process.stdout is not None
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                    raise ChildFailed(f"{self._label} did not answer within {timeout_s:g} s{self.log_tail()}")
                chunk = os.read(self._process.stdout.fileno(), 2**16)
                if not chunk:
                    raise self._ended()
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return message_of(line, expected, self._label)

    def result(self, timeout_s: float | None) -> Any:
        """What the function that it calls returned; raises as `receive` does."""
        return self.receive(timeout_s, Done).value

    def log_tail(self, count: int = _LOG_LINES) -> str:
        """The last lines of its log with an introduction to them, or nothing if it is empty."""
        said = os.pread(self._log.fileno(), 2**20, max(0, os.fstat(self._log.fileno()).st_size - 2**20))
        lines = said.decode(errors="replace").strip().splitlines()[-count:]
        return "; its log ends with:\n" + "\n".join(lines) if lines else ""

    def close(self) -> None:
        """End the process and its descendants; kill those that take long. May be called again."""
        self.end_input()
        family: list[psutil.Process] = []
        if self.status is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.pid).children(recursive=True)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()
            self._process.wait()
        end_processes(family, _FAMILY_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ended(self) -> ChildFailed:
        try:
            status: int | str = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = "unknown: it closed its output only"
        return ChildFailed(f"{self._label} ended (exit status {status}){self.log_tail()}")
