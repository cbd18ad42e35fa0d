"""How many retries the router allows: a share of recent traffic, so that an outage does not multiply the load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.clock import Clock

WINDOW_S = 4
MIN_RETRIES = 10
"""Retries that every window allows, however little traffic there is."""


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """At most `MIN_RETRIES` plus ``share`` times the requests of the last `WINDOW_S` seconds may be retries.

    ``running`` tells how many requests the router has now; those that came before the window count while they run.
    """

    def __init__(self, share: float, clock: Clock, running: Callable[[], int]) -> None:
        self._share = share
        self._clock = clock
        self._running = running
        self._seconds: deque[_Second] = deque()

    def note_request(self) -> None:
        """Count a new request."""
        self._now().requests += 1

    def take(self) -> bool:
        """Take one retry; False if none is left."""
        now = self._now()
        requests = max(self._running(), sum(second.requests for second in self._seconds))
        if sum(second.retries for second in self._seconds) >= MIN_RETRIES + self._share * requests:
            return False
        now.retries += 1
        return True

    def wait_s(self) -> float:
        """Seconds until the oldest retries leave the window; 0 if it has none."""
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
