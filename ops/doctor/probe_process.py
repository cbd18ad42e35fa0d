"""A `Probe` in a process of its own on this host: a line of JSON for each call, and one for its answer. It ends with
its standard input, so with its parent.

`python -m ops.doctor.probe_process` is the process, `ProbeProcess` the parent's end of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.doctor.source_hash import ROOT
from pdserve.core.errors import DeadlineExceeded, WorkerLost, from_wire

_END_S = 15.0


class ProbeProcess:
    """Starts at once; `close` ends it. ``root`` is the installation it runs, ``prefix`` a command that runs it, ``cwd``
    its folder."""

    def __init__(
        self, name: str, *, root: Path = ROOT, prefix: Sequence[str] = (), cwd: str | Path | None = None
    ) -> None:
        self._name, self._turn = name, threading.Lock()
        self._unread, self._silent = b"", False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "ops.doctor.probe_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def call(self, what: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """What the probe answers; its own errors, WorkerLost if it is gone, DeadlineExceeded if it does not answer in
        time (it is of no use then)."""
        with self._turn:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                raise self._lost() from None
            answer = json.loads(self._line(what, timeout_s))
        if "error" in answer:
            raise from_wire(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End it; killed if it does not end by itself, or has not answered before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(0.0 if self._silent else _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _line(self, what: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        fd, deadline_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    self._silent = True
                    raise DeadlineExceeded(f"{self._name} did not answer {what} within {timeout_s:.0f} s")
                if not (data := os.read(fd, 2**16)):
                    raise self._lost()
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self) -> WorkerLost:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return WorkerLost(f"{self._name} ended: {said}")


def main() -> None:
    """The process's own part."""
    from ops.doctor.probe import Probe

    logging.basicConfig(level=logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not come between
    probe = Probe()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        answers.write(json.dumps(probe.call(what, arguments)) + "\n")
    probe.close()


if __name__ == "__main__":
    main()
