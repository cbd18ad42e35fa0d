"""Probes as processes of this host, for a service that starts its own Ray; Ray itself is not needed.

`python -m ops.doctor.local_host` is a probe's process. It reads one JSON line per call from its standard input, writes
one per answer to its standard output, and ends when its input does, hence with its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.doctor.node_report import ROOT, NodeReport
from ops.doctor.probe_api import ProbeHandle
from ops.launch.plan import Node
from ops.launch.state import ServiceState
from pdserve.core.errors import DeadlineExceeded, WorkerLost

NODE_ID = "local"
_REPORT_S = 120.0
_END_S = 15.0


class LocalHost:
    """This host as the only node. GPUs are counted unless the configured ``device`` is cpu."""

    local, host, node_id = True, "127.0.0.1", NODE_ID

    def __init__(self, device: str) -> None:
        self._device = device

    def nodes(self) -> Sequence[Node]:
        """One node with the cores that this process may use."""
        present = self._device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
        gpus = self._count_gpus() if present else 0
        resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(gpus)}
        return [Node(NODE_ID, self.host, resources, resources)]

    def services(self) -> Sequence[int]:
        """The services whose supervisors run on this host."""
        return [state.port for state in ServiceState.all() if state.process() is not None]

    def probe(self, node: Node, name: str) -> ProbeHandle:
        """Start a process."""
        return ProbeProcess(name)

    def _count_gpus(self) -> int:
        probe = ProbeProcess("the probe that counts GPUs")
        try:
            report = probe.call("report", {"model": "dummy:135m"}, _REPORT_S, NodeReport)  # which has no files to read
            return len(report.devices)
        except (WorkerLost, DeadlineExceeded):  # the node's own probe reports what is wrong
            return 0
        finally:
            probe.close()


class ProbeProcess(ProbeHandle):
    """A probe's process, started at once and ended by `close`. ``root`` is the installation that it runs, ``prefix`` a
    command in front of it, ``cwd`` its working directory. A process that misses a deadline is killed."""

    def __init__(
        self, name: str, *, root: Path = ROOT, prefix: Sequence[str] = (), cwd: str | Path | None = None
    ) -> None:
        super().__init__(name)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "ops.doctor.local_host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

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
        raise self._lost()

    def _lost(self) -> WorkerLost:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "without an error message")
        return WorkerLost(f"{self._name} ended: {last}")


def main() -> None:
    """Run a probe in this process."""
    from ops.doctor.probe import WorkerProbe

    logging.basicConfig(level=logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    probe = WorkerProbe()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answers.write(json.dumps(probe.call(what, arguments)) + "\n")
    probe.close()


if __name__ == "__main__":
    main()
