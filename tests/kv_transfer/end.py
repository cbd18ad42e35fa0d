"""A handle on an `end_process`: tells it what to do, stops, continues and kills it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_ANSWER_S = 120.0
Values = dict[str, Any]


class EndGone(Exception):
    """The process is gone, and will not answer."""


class End:
    """A process, killed by `close`. Safe to use from several threads."""

    def __init__(
        self,
        role: str,
        transport: str,
        *,
        checksum: bool = True,
        epoch: str = "e1",
        lease_s: float = 5.0,
        message_bytes: int = 8 * 2**20,
        max_inflight_bytes: int = 32 * 2**20,
        num_blocks: int = 256,
    ) -> None:
        end: Values = {"checksum": checksum, "lease_s": lease_s}
        if role == "receiver":
            end["epoch"] = epoch
        else:
            end |= {"connect_timeout_s": 5.0, "message_bytes": message_bytes, "max_inflight_bytes": max_inflight_bytes}
        options = {"role": role, "transport": transport, "num_blocks": num_blocks, "end": end}
        self.role, self.epoch, self.num_blocks = role, epoch, num_blocks
        self._killed = False
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("end_process.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"},
        )
        self._answers: dict[int, Values] = {}
        self._changed = threading.Condition()
        self._next = 0
        self._gone = False
        self._reader = threading.Thread(target=self._read, name="end-read", daemon=True)
        self._reader.start()
        self._about: Values | None = None
        self._asking = threading.Lock()

    @property
    def about(self) -> Values:
        """What it said when it was ready."""
        with self._asking:
            if self._about is None:
                self._about = self.result(0)
            return self._about

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped)."""
        return not self._killed and self._process.poll() is None

    def begin(self, do: str, **arguments: object) -> int:
        """Have it do something; the number of the order, for `result`."""
        assert self._process.stdin is not None
        with self._changed:
            self._next += 1
            number = self._next
            try:
                self._process.stdin.write(json.dumps({"number": number, "do": do, **arguments}).encode() + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                raise EndGone(f"the {self.role} is gone") from None
        return number

    def result(self, number: int, timeout_s: float = _ANSWER_S) -> Values:
        """What came of an order."""
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self._gone, timeout_s), (
                f"the {self.role} did not answer within {timeout_s} s"
            )
            if number not in self._answers:
                raise EndGone(f"the {self.role} is gone")
            values = self._answers.pop(number)
        assert "bug" not in values, f"the {self.role}: {values}"
        return values

    def call(self, do: str, **arguments: object) -> Values:
        """Have it do something now."""
        return self.result(self.begin(do, **arguments))

    def stop(self) -> None:
        """SIGSTOP; returns once it stands still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        self._killed = True
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """Kill it, free what it needed here."""
        self.kill()
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # an order that was never read
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values: Values = json.loads(line)
            with self._changed:
                self._answers[values.pop("number")] = values
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()


def until(condition: Any, timeout_s: float = 30.0) -> bool:
    """Whether it comes true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (true := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(true)
