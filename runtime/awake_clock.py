"""A clock for timeouts that stands still while its event loop is blocked or its process is stopped.

When a loop was blocked for three seconds, answers that arrived in that time wait unread in sockets. A timer on the
host's clock would fire before the loop reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

TICK_S = 0.1
MOST_S = 0.25
"""Longest time that a gap between two readings counts as."""


class AwakeClock:
    """Seconds for which an event loop ran. Read it every `TICK_S` on that loop, or use `awake_clock`, which does so."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._read_s = now()
        self._awake_s = 0.0

    def now(self) -> float:
        """Seconds for which the loop has run since the clock was created."""
        now_s = self._now()
        self._awake_s += min(now_s - self._read_s, MOST_S)
        self._read_s = now_s
        return self._awake_s


_CLOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, AwakeClock] = WeakKeyDictionary()


def awake_clock() -> AwakeClock:
    """The clock of the running event loop, which the loop advances from the first call on."""
    loop = asyncio.get_running_loop()
    clock = _CLOCKS.get(loop)
    if clock is None:
        # By the clock of its timers, which a simulated world has, too. Weak, because `_CLOCKS` would keep it otherwise.
        weak = ref(loop)
        clock = _CLOCKS[loop] = AwakeClock(lambda: time.monotonic() if (here := weak()) is None else here.time())
        loop.call_soon(_tick, loop, clock)
    return clock


def _tick(loop: asyncio.AbstractEventLoop, clock: AwakeClock) -> None:
    clock.now()
    loop.call_later(TICK_S, _tick, loop, clock)


class RunningAwakeClock:
    """A `Clock` that reads the `awake_clock` of the running event loop. It can be created before the loop."""

    def now(self) -> float:
        """Seconds for which the running loop has run."""
        return awake_clock().now()


async def wait_awake(future: asyncio.Future[Any], timeout_s: float) -> bool:
    """Wait until ``future`` is done, for at most ``timeout_s`` seconds of the running loop's `awake_clock`. Returns
    whether it is done; the future is never cancelled. If it outlives the wait, its error counts as retrieved."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    clock = awake_clock()
    until_s = clock.now() + timeout_s
    while not future.done() and (left_s := until_s - clock.now()) > 0:
        await asyncio.wait({future}, timeout=left_s)
    return future.done()
