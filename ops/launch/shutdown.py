"""The shutdown of a service: its requests by signals and calls, the time left for requests in progress, and its
progress."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pdserve.core.errors import LaunchError

DRAIN_S = 30.0
"""Limit: requests in progress when the service ends, unless `down --drain` says otherwise. Then: UNAVAILABLE."""

FOLLOW_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StartCancelled(LaunchError):
    """The service was asked to end while it was starting. ``signum`` is the signal that asked; 0 for `pdserve down`."""

    signum = 0


class ServiceShutdown:
    """Requested by signals (see `caught`) and by the operator's `Stop`. ``report`` gets the progress.

    A signal handler runs between any two instructions of the main thread and must not take locks, so it only counts;
    `is_requested` acts on the count. The first signal leaves `DRAIN_S` for requests in progress, the second none."""

    def __init__(self, report: Callable[[str], None] = lambda stage: None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._deadline_s: float | None = None
        self._signals = 0
        self._heeded = 0
        self._ended = False
        self._previous: dict[signal.Signals, Any] = {}  # handlers from before `caught`
        self._followers: list[queue.SimpleQueue[str | None]] = []
        self.signum = 0
        """The last signal; 0 if there was none."""

    def is_requested(self) -> bool:
        """Whether the service is to end."""
        while self._heeded < self._signals:
            self._heeded += 1
            self.request(DRAIN_S if self._heeded == 1 else 0.0)
        return self._deadline_s is not None

    @property
    def time_left_s(self) -> float:
        """Time left for requests in progress, once `is_requested`."""
        return (
            max(0.0, self._deadline_s - time.monotonic())
            if self.is_requested() and self._deadline_s is not None
            else 0.0
        )

    def request(self, drain_s: float) -> None:
        """Request the end of the service. If it is requested more than once, the earliest deadline counts."""
        deadline_s = time.monotonic() + drain_s
        with self._lock:
            self._deadline_s = deadline_s if self._deadline_s is None else min(deadline_s, self._deadline_s)

    def report(self, stage: str) -> None:
        """Report progress, also to all callers of `follow`."""
        self._report(stage)
        with self._lock:
            for follower in self._followers:
                follower.put(stage)

    def end(self) -> None:
        """The shutdown is complete; ends `follow`."""
        with self._lock:
            self._ended = True
            for follower in self._followers:
                follower.put(None)

    def follow(self) -> Iterator[str]:
        """Progress from now on, until `end`; an empty string for every second without any."""
        stages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self._lock:
            self._followers.append(stages)
            if self._ended:
                stages.put(None)
        try:
            while True:
                try:
                    stage = stages.get(timeout=FOLLOW_S)
                except queue.Empty:
                    stage = ""
                if stage is None:
                    return
                yield stage
        finally:
            with self._lock:
                self._followers.remove(stages)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within this context SIGTERM, SIGINT and SIGHUP only request the shutdown. Only on the main thread."""

        handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}
        self._previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        self.renew_handlers()
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def renew_handlers(self) -> None:
        """Install the handlers of `caught` again. Call this while Ray connects and afterwards, because Ray installs a
        handler that aborts the process three seconds after a signal."""
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        signal.alarm(0)  # Ray's handler would abort the process with an alarm
        self.signum = signum
        self._signals += 1
