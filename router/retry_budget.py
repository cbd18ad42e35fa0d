"""How many retries the router allows: a share of recent traffic, so that an outage does not multiply the load."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from core.clock import Clock

WINDOW_S = 10
MIN_RETRIES = 10
"""Retries that every window allows, however little traffic there is."""


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """At most `MIN_RETRIES` plus ``share`` times the requests of the last `WINDOW_S` seconds may be retries."""

    def __init__(self, share: float, clock: Clock) -> None:
        self._share = share
        self._clock = clock
        self._seconds: deque[_Second] = deque()

    def note_request(self) -> None:
        """A request has come; what is counted of it is that it came."""
        self._now().requests += 1

    def take(self, running: int) -> bool:
        """Take one retry, if there is one left. ``running`` requests are on their way now, whenever they came."""
        now = self._now()
        requests = max(running, sum(second.requests for second in self._seconds))
        if sum(second.retries for second in self._seconds) >= MIN_RETRIES + self._share * requests:
            return False
        now.retries += 1
        return True

    def wait_s(self) -> float:
        """Seconds until the oldest retries of the window no longer count."""
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
