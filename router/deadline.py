"""The deadline of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """A deadline at ``deadline_s`` on ``clock``, converted to the event loop's clock. One timer ends all waits for
    which it has come, so that a request may have many short ones. `close` stops the timer."""

    __slots__ = ("_loop", "_timer", "_until", "_waits")

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waits: dict[asyncio.Task[Any], _Wait] = {}  # the innermost wait of each task
        self.move(deadline_s, clock)

    def move(self, deadline_s: float, clock: Clock) -> None:
        """Set another deadline, while nothing waits for this one."""
        self.close()
        self._until = self._loop.time() + deadline_s - clock.now()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._until - self._loop.time())

    async def bound(self, awaitable: Awaitable[T], doing: str) -> T:
        """Await ``awaitable``, in a task. `DeadlineExceeded` at the deadline, with what the request was ``doing``; an
        awaitable is not begun after it."""
        task = asyncio.current_task()
        assert task is not None, "it is called in a task"
        if self._timer is None:
            if self._until <= self._loop.time():
                if asyncio.iscoroutine(awaitable):
                    awaitable.close()
                raise self._exceeded(doing)
            self._timer = self._loop.call_at(self._until, self._end)
        waits = self._waits
        wait = waits[task] = _Wait(task, waits.get(task))
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not wait.ended:
                raise
            wait.ended = False
            if task.uncancel() > wait.cancellations:  # others have cancelled the task, too
                raise
            raise self._exceeded(doing) from None
        finally:
            if wait.ended:  # it has come to its own end meanwhile
                task.uncancel()
            if wait.outer is None:
                del waits[task]
            else:
                waits[task] = wait.outer

    async def sleep(self, seconds: float, doing: str) -> None:
        """Sleep, but not past the deadline."""
        if seconds > 0:
            await self.bound(asyncio.sleep(seconds), doing)

    def close(self) -> None:
        """Stop the timer, until the next wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        for task, wait in self._waits.items():
            wait.ended = True
            task.cancel()

    @staticmethod
    def _exceeded(doing: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"deadline: it passed while {doing}; raise the timeout or reduce the load")


class _Wait:
    """A wait of a task until a deadline. ``outer``: the wait of the same task and deadline that it is a part of.
    ``cancellations``: of the task by others, when it began. ``ended``: the deadline has cancelled the task."""

    __slots__ = ("cancellations", "ended", "outer")

    def __init__(self, task: asyncio.Task[Any], outer: _Wait | None) -> None:
        self.cancellations = task.cancelling()
        self.outer = outer
        self.ended = False
