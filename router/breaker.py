"""Whether a worker may get requests, by how it served the last ones."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from pdserve.core.errors import PdserveError
from pdserve.core.request import counted

TRIP_AFTER = 3
"""A worker that fails so many requests in a row pauses: one or two may be the requests' own fault."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Limit: pause of a worker that fails its probes.

The first pause gives a worker time to restart its engine. It doubles after each failed probe, so that a worker that
stays broken costs few requests."""


class BreakerState(StrEnum):
    """``closed``: requests flow. ``open``: none does. ``half_open``: one does, as a probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit breaker of one worker, which all its incarnations share.

    `TRIP_AFTER` failures in a row open it for `FIRST_PAUSE_S`. Then one request probes the worker: its first token from
    there closes the breaker, and a failure opens it for twice as long, up to `MAX_PAUSE_S`. A request that succeeds
    ends the row of failures. ``suspect`` keeps requests away as well, until the worker's next heartbeat: a request has
    lost its connection to it.

    ``failures`` are those in a row, ``total`` all of them by the class of the error, and ``reason`` the last one.
    """

    def __init__(self) -> None:
        self.suspect = False
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.total: Counter[str] = Counter()
        self.reason = ""
        self.pause_s = 0.0
        """Length of the present pause; 0 if it is closed."""
        self._probing = False
        self._round = 0

    @property
    def allows_requests(self) -> bool:
        """Whether the worker may get a request."""
        if self.suspect or self.state is BreakerState.OPEN:
            return False
        return not self._probing

    def begin(self) -> int:
        """Note that the worker gets a request. Returns its round: all requests between two failures have the same."""
        self._probing = self.state is BreakerState.HALF_OPEN
        return self._round

    def failed(self, error: PdserveError, number: int, *, may_open: bool) -> bool:
        """Count the failure of a request of round ``number``. Returns whether the breaker opens, for `pause_s`; only if
        it ``may_open``. Only requests of the present round count, because one loss ends all that are there."""
        self.total[type(error).__name__] += 1
        if number != self._round:
            return False
        self._round += 1
        self._probing = False
        self.failures += 1
        self.reason = str(error)
        if self.failures < TRIP_AFTER or self.state is BreakerState.OPEN or not may_open:
            return False
        self.pause_s = min(2 * self.pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
        self.state = BreakerState.OPEN
        return True

    def answered(self, number: int) -> bool:
        """Note that a request of round ``number`` has its first token. Returns whether the breaker closes: the worker
        need not idle until a probe has streamed to its end. Only requests of the present round count."""
        if number != self._round or self.state is not BreakerState.HALF_OPEN:
            return False
        self.spare()
        return True

    def succeeded(self, number: int) -> None:
        """Count a request of round ``number`` as served. Only requests of the present round count."""
        if number == self._round and self.state is BreakerState.CLOSED:
            self.failures = 0
            self.pause_s = 0.0
            self.reason = ""

    def half_open(self) -> None:
        """Let a probe pass, because the pause is over. Ignored unless it is open."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self._probing = False

    def spare(self) -> None:
        """Let all requests pass, because a probe was answered or no other worker is there. The next failure may open it
        again."""
        self.state = BreakerState.CLOSED
        self._probing = False

    def left(self, number: int) -> None:
        """Note that a request of round ``number`` has left the worker. A probe that showed nothing makes way for
        another."""
        if number == self._round:
            self._probing = False

    @property
    def explanation(self) -> str:
        """Why it is not closed; empty if it is."""
        if self.state is BreakerState.CLOSED:
            return ""
        until = f"pauses for {self.pause_s:g} s" if self.state is BreakerState.OPEN else "gets one request as a probe"
        return f"{counted(self.failures, 'request')} in a row failed, so it {until}; the last: {self.reason}"
