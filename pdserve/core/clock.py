"""The clock as a dependency: product code asks a `Clock`, tests hand in a `FakeClock`.

All times inside pdserve are seconds of one host's monotonic clock. On Linux that clock is shared by all processes of
a host, so a worker and its engine need no conversion; between hosts offsets are measured (see `pdserve.core.timeline`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol


def clock_id() -> str:
    """Names the monotonic clock this process reads: two processes with equal ids read the very same clock.

    The clock starts at boot and may be shifted per time namespace, so both are in the name. Empty (never equal to
    anybody's) where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


class Clock(Protocol):
    """Anything that tells monotonic seconds."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        ...


class MonotonicClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point of this host."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        """The time it was last set to, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (never back: ValueError)."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
