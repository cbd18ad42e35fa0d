"""Bursts of new requests: they are taken in, or refused, before work on the running requests goes on."""

from __future__ import annotations

import asyncio

ROUNDS = 6
BURST = 4
SLOW_S = 0.0005
"""`BURST` arrivals, each within `ROUNDS` rounds of the event loop after the one before but more than `SLOW_S` apart on
average, show that more wait to be accepted."""
QUIET_S = 0.02
HOLD_S = 1.0
REST_SHARE = 2.0
"""A hold lasts until nothing has arrived for `QUIET_S`, for `HOLD_S` at most. `REST_SHARE` times as long passes before
the next."""
LOOK_EVERY_S = 0.002


class Arrivals:
    """Recognizes bursts. While one arrives, `settled` waits: until nothing has arrived for `QUIET_S`, at most `HOLD_S`.

    gRPC hands over one call per round of the event loop. On a busy gateway a round is long, and a burst would wait
    inside gRPC for many seconds instead of being queued or refused. With other work held, rounds are short.
    """

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None  # done when the hold ends
        self._begun_s = 0.0
        self._rest_until_s = 0.0
        self._streak = 0
        self._streak_s = 0.0
        self._last_s = 0.0
        self._rounds_left = 0

    @property
    def is_burst(self) -> bool:
        """Whether a burst is being taken in."""
        return self._opened is not None

    def note(self) -> None:
        """A request has arrived."""
        loop = asyncio.get_running_loop()
        now_s = self._last_s = loop.time()
        if self._rounds_left:
            self._streak += 1
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
        """Return when no burst is being taken in."""
        while self._opened is not None:
            await asyncio.shield(self._opened)

    def _round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._rounds_left -= 1
        if self._rounds_left:
            loop.call_soon(self._round, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._opened is not None, "this runs while others are held"
        now_s = loop.time()
        if now_s - self._last_s < QUIET_S and now_s - self._begun_s < HOLD_S:
            loop.call_later(LOOK_EVERY_S, self._look, loop)
            return
        self._rest_until_s = now_s + REST_SHARE * (now_s - self._begun_s)
        opened, self._opened = self._opened, None
        opened.set_result(None)
