"""Retries: whether a failed attempt is tried again, on which workers, and how many retries the router allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, PdserveError, WorkerLost
from router.attempt import Attempt
from router.registry import Assignment

MAX_LOST_IN_A_ROW = 2
"""Limit: workers lost in a row within 1 s of getting a request. Then: UNAVAILABLE.

The request may be the cause. The time is `LOST_AT_ONCE_S`, and no token may have come."""
LOST_AT_ONCE_S = 1.0

RETRY_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
"""The pause before the first retry of a request, and the longest one. It doubles with each retry: the first is short,
because a single failure is over at once; a longer outage gets fewer retries."""

WINDOW_S = 4
MIN_RETRIES = 10
"""Limit: retries within 4 s besides half of the requests. Then: they wait."""
RETRY_SHARE = 0.5
"""Further retries in a window, as a share of its requests: an outage adds at most half of the load again."""


class Failures:
    """The failed attempts of a request. ``avoid`` and ``prefer`` go into the `router.view.Needs` of the next
    attempt. An attempt that gave tokens resets the counts."""

    def __init__(self, max_attempts: int) -> None:
        self.in_a_row = 0
        self.avoid: frozenset[str] = frozenset()
        self.prefer = ""
        self._max_attempts = max_attempts
        self._lost_in_a_row = 0

    @property
    def is_last(self) -> bool:
        """Whether the next failure ends the request."""
        return self.in_a_row + 1 >= self._max_attempts

    @property
    def pause_s(self) -> float:
        """The pause before the next attempt, without jitter."""
        return min(RETRY_PAUSE_S * 2 ** (self.in_a_row - 1), MAX_PAUSE_S) if self.in_a_row else 0.0

    def reset(self) -> None:
        """Reset the counts."""
        self.in_a_row = self._lost_in_a_row = 0

    def add(self, error: PdserveError, attempt: Attempt, assignment: Assignment) -> PdserveError | None:
        """Count a failed attempt. Returns the error that ends the request, or None for a retry."""
        # Another worker may have more room; `router.placement` refuses requests that no worker can hold.
        elsewhere = isinstance(error, CapacityExceeded) and not attempt.failed <= self.avoid
        if attempt.gave_tokens:
            self.reset()
        self.in_a_row += 1
        at_once = isinstance(error, WorkerLost) and not attempt.gave_tokens and attempt.age_s < LOST_AT_ONCE_S
        self._lost_in_a_row = self._lost_in_a_row + 1 if at_once else 0
        if not (error.retryable or elsewhere) or self.in_a_row >= self._max_attempts:
            return error
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            return WorkerLost(
                f"{error}; the second worker in a row was lost as soon as it got this request, so there is no "
                "further retry"
            )
        self.avoid |= attempt.failed
        prefill = assignment.prefill.worker.worker_id
        self.prefer = "" if prefill in attempt.failed else prefill
        return None


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Limits retries to `MIN_RETRIES` plus `RETRY_SHARE` times the requests of the last `WINDOW_S` seconds, so that an
    outage does not multiply the load.

    ``running`` returns the number of requests in the router, which counts if it is larger than the number of requests
    in the window.
    """

    def __init__(self, clock: Clock, running: Callable[[], int]) -> None:
        self._clock = clock
        self._running = running
        self._seconds: deque[_Second] = deque()

    def note_request(self) -> None:
        """Count a new request."""
        self._now().requests += 1

    def take(self) -> bool:
        """Take one retry. Returns False if none is left."""
        now = self._now()
        requests = max(self._running(), sum(second.requests for second in self._seconds))
        if sum(second.retries for second in self._seconds) >= MIN_RETRIES + RETRY_SHARE * requests:
            return False
        now.retries += 1
        return True

    def wait_s(self) -> float:
        """Seconds until the oldest retries leave the window; 0 if it has no retries."""
        now_s = self._clock.now()
        oldest = next((second for second in self._seconds if second.retries), None)
        return 0.0 if oldest is None else max(0.0, oldest.number + WINDOW_S - now_s)

    def _now(self) -> _Second:
        number = int(self._clock.now())
        while self._seconds and self._seconds[0].number <= number - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]
