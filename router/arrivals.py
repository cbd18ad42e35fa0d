"""Bursts of new requests are accepted, or refused, before work on running requests continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ROUNDS = 6
BURST = 4
SLOW_S = 0.0005
"""A burst is `BURST` arrivals, each within `ROUNDS` rounds of the event loop after the one before, and on average more
than `SLOW_S` apart. It indicates that more requests wait to be accepted."""
LOOK_AGAIN_S = 0.005
"""After an arrival that no other one followed, arrivals are not watched for so long: to count rounds costs time."""
QUIET_S = 0.02
HOLD_S = 1.0
"""Limit: pause of running requests while a burst is queued or refused, for a third of the time at most.

A hold lasts until nothing has arrived for `QUIET_S`. A rest of `REST_SHARE` times its length follows."""
REST_SHARE = 2.0
LOOK_EVERY_S = 0.002


class Arrivals:
    """Detects bursts and holds other work (`settled`) while they arrive.

    gRPC passes on one call per round of the event loop. On a busy gateway a round is long, so that a burst would wait
    inside gRPC for many seconds instead of being queued or refused. Rounds are short while other work is held.
    """

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None  # done when the hold ends
        self._held: list[Callable[[], None]] = []
        self._begun_s = 0.0
        self._rest_until_s = 0.0
        self._streak = 0
        self._streak_s = 0.0
        self._last_s = 0.0
        self._rounds_left = 0
        self._look_s = 0.0

    @property
    def is_burst(self) -> bool:
        """Whether other work is held."""
        return self._opened is not None

    def note(self) -> None:
        """Note the arrival of a request."""
        loop = asyncio.get_running_loop()
        now_s = self._last_s = loop.time()
        if self._rounds_left:
            self._streak += 1
        elif now_s < self._look_s:
            return
        else:
            self._streak, self._streak_s = 0, now_s
            loop.call_soon(self._round, loop)
        self._rounds_left = ROUNDS
        is_slow = now_s - self._streak_s > SLOW_S * self._streak
        if self._opened is None and self._streak >= BURST and is_slow and now_s >= self._rest_until_s:
            self._opened = loop.create_future()
            self._begun_s = now_s
            loop.call_later(LOOK_EVERY_S, self._look, loop)

    async def settled(self) -> None:
        """Wait until no work is held."""
        while self._opened is not None:
            await asyncio.shield(self._opened)

    def when_settled(self, work: Callable[[], None]) -> None:
        """Call ``work`` when no work is held any more. It must be held now."""
        self._held.append(work)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._rounds_left -= 1
        if self._rounds_left:
            loop.call_soon(self._round, loop)
        elif self._streak < BURST:
            self._look_s = loop.time() + LOOK_AGAIN_S

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._opened is not None, "_look runs only during a hold"
        now_s = loop.time()
        if now_s - self._last_s < QUIET_S and now_s - self._begun_s < HOLD_S:
            loop.call_later(LOOK_EVERY_S, self._look, loop)
            return
        self._rest_until_s = now_s + REST_SHARE * (now_s - self._begun_s)
        opened, self._opened = self._opened, None
        opened.set_result(None)
        held, self._held = self._held, []
        for work in held:
            work()
