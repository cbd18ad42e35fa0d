"""Clocks: the fake one moves only when told, the real one is the same in all processes of a host."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pdserve.core.clock import FakeClock, clock_id


def test_the_fake_clock_moves_only_when_told_and_never_back() -> None:
    clock = FakeClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(0.5)
    clock.advance(0.0)
    assert clock.now() == 5.5
    with pytest.raises(ValueError, match=r"cannot go back by 0\.1 s"):
        clock.advance(-0.1)
    assert clock.now() == 5.5


def test_two_processes_of_a_host_read_the_same_clock() -> None:
    script = "from pdserve.core.clock import clock_id; import time; print(clock_id(), time.monotonic())"
    before = time.monotonic()
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    theirs, now = told.stdout.rsplit(maxsplit=1)
    assert theirs == clock_id()
    assert before < float(now) < time.monotonic()
