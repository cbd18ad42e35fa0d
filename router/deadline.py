"""A request's deadline, as something awaits can be bound by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """``deadline_s`` is a time on ``clock``; what is left of it when this is made runs on the event loop's clock."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + deadline_s - clock.now()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._until - self._loop.time())

    async def bound(self, awaitable: Awaitable[T], doing: str) -> T:
        """The result of ``awaitable``, or `DeadlineExceeded` that says what the request was ``doing``."""
        try:
            async with asyncio.timeout_at(self._until):
                return await awaitable
        except TimeoutError:
            raise DeadlineExceeded(f"deadline: it passed while {doing}; raise the timeout or reduce the load") from None

    async def sleep(self, seconds: float, doing: str) -> None:
        """Sleep, but not past the deadline."""
        if seconds > 0:
            await self.bound(asyncio.sleep(seconds), doing)
