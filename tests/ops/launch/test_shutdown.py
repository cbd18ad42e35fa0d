"""Signals only request the shutdown: the first leaves time for requests in progress, the second none."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ops.launch.shutdown import DRAIN_S, ServiceShutdown


def test_the_first_signal_leaves_time_the_second_none() -> None:
    shutdown = ServiceShutdown()
    before = signal.getsignal(signal.SIGTERM)
    with shutdown.caught():
        assert not shutdown.is_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.is_requested()
        assert shutdown.signum == signal.SIGTERM
        assert DRAIN_S - 5 < shutdown.time_left_s <= DRAIN_S
        # A library takes the signal for itself; afterwards it is ours again.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        shutdown.renew_handlers()
        os.kill(os.getpid(), signal.SIGINT)
        assert shutdown.time_left_s == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.timeout(30, method="thread")  # pytest's own alarm would be the one that is put off
def test_a_signal_puts_off_the_alarm_that_would_abort_the_process() -> None:
    """Ray's handler, which is replaced again, sets an alarm of three seconds at the first signal."""
    previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with ServiceShutdown().caught():
            signal.alarm(20)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.alarm(0) == 0, "none was left"
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_the_earliest_deadline_counts_and_progress_is_reported() -> None:
    told: list[str] = []
    shutdown = ServiceShutdown(told.append)
    following = shutdown.follow()
    shutdown.request(100.0)
    shutdown.request(10.0)
    shutdown.request(50.0)
    assert 5 < shutdown.time_left_s <= 10
    stages: list[str] = []
    thread = threading.Thread(target=lambda: stages.extend(stage for stage in following if stage))
    thread.start()
    while not shutdown._followers:
        pass
    shutdown.report("waiting")
    shutdown.end()
    thread.join(10)
    assert stages == told == ["waiting"]
    assert list(shutdown.follow()) == [], "one who comes late is not kept waiting"
