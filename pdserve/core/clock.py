"""The clock as a dependency: product code uses a `Clock`, tests pass a `FakeClock`.

All times inside pdserve are seconds of one host's monotonic clock. On Linux all processes of a host share that clock,
so a worker and its engine need no conversion. Offsets between hosts are measured (see `pdserve.core.timeline`)."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Protocol


@functools.cache
def clock_id() -> str:
    """Identifies the monotonic clock that this process reads: processes with equal ids read the same clock.

    The id contains the boot and the time namespace, because the clock starts at boot and may be shifted per namespace.
    Empty, which never matches, where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        ...


class MonotonicClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point of this host."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only by `advance`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        """The current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``; ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
