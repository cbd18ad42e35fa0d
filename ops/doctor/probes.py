"""The doctor's probes, as the examining process sees them: how a probe is called, and where it runs.

A probe runs on the node of a worker and answers in plain values: `WorkerProbe.call` makes them from the types of
`ops.doctor.report`, and `ProbeHandle.call` turns them back. For a service that starts its own Ray, probes are processes
of this host, and Ray is not needed. `python -m ops.doctor.probe` is such a process. It reads one JSON line per call
from its standard input, writes one per answer to its standard output, and ends when its input does, hence with its
parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ops.doctor.node_report import ROOT
from ops.launch.plan import Node
from ops.launch.state import ServiceState
from pdserve.core.errors import DeadlineExceeded, WorkerLost, from_wire

_END_S = 15.0
T = TypeVar("T")


class ProbeHandle(ABC):
    """A `WorkerProbe` in another process. Concurrent calls are serialized."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calling = threading.Lock()

    def call(self, what: str, arguments: Mapping[str, Any], timeout_s: float, answer_type: type[T]) -> T:
        """Call the probe and return its answer. Raises the probe's own errors, WorkerLost if its process is gone or its
        answer is unreadable, and DeadlineExceeded after ``timeout_s``."""
        with self._calling:
            answer = self._ask(what, msgspec.to_builtins(arguments), timeout_s)
        if "error" in answer:
            raise from_wire(*answer["error"])
        try:
            return msgspec.convert(answer["value"], answer_type)
        except msgspec.ValidationError as error:
            raise WorkerLost(f"{self._name} gave an unreadable answer ({error}); its pdserve differs") from None

    @abstractmethod
    def _ask(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer of `WorkerProbe.call`."""

    @abstractmethod
    def close(self) -> None:
        """End the probe, even in the middle of a call."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a service would run."""

    nodes: Sequence[Node]  # that it could use
    services: Sequence[int]  # public ports of the services that already run there
    start: Callable[[Node, str], ProbeHandle]  # a probe with a name on a node
    local: bool  # this host alone, for a service that starts its own Ray
    host: str  # the gateway's address
    node_id: str  # and its node


def local_site(device: str) -> Site:
    """This host as the only node, with the cores that this process may use. GPUs are counted unless the configured
    ``device`` is cpu."""
    gpus = [] if device == "cpu" else [*Path("/dev").glob("nvidia[0-9]*")]
    if gpus and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = gpus[: len([each for each in visible.split(",") if each.strip()])]
    resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(len(gpus))}
    node = Node("local", "127.0.0.1", resources, resources)
    running = [state.port for state in ServiceState.all() if state.process() is not None]
    return Site([node], running, lambda _, name: ProbeProcess(name), True, node.ip, node.node_id)


class ProbeProcess(ProbeHandle):
    """A probe's process, started at once and ended by `close`. ``root`` is the installation that it runs, ``prefix`` a
    command in front of it, ``cwd`` its working directory. A process that misses a deadline is killed."""

    def __init__(
        self, name: str, *, root: Path = ROOT, prefix: Sequence[str] = (), cwd: str | Path | None = None
    ) -> None:
        super().__init__(name)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "ops.doctor.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    def close(self) -> None:
        """End the process, which is killed if it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _ask(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Send the call and wait for its answer. Kills the process after ``timeout_s``, which ends the wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        finally:
            timer.cancel()
        if line.endswith(b"\n"):  # else the process ended while it answered
            answer: Mapping[str, Any] = json.loads(line)
            return answer
        if expired.is_set():
            raise DeadlineExceeded(f"{self._name} did not answer {what} within {timeout_s:.0f} s")
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().decode(errors="replace").split("\n") if line.strip()]
        raise WorkerLost(f"{self._name} ended: {lines[-1] if lines else 'without an error message'}")
