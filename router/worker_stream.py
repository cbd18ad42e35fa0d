"""One worker's outputs for one request, with arrival times, a deadline, and the worker named when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from core.clock import Clock
from core.errors import WorkerLost
from core.worker import TokenOutput
from router.deadline import Deadline
from router.registered_worker import RegisteredWorker


class Arrival(NamedTuple):
    """An output and when it reached the router (seconds of the gateway's clock)."""

    output: TokenOutput
    time_s: float


class WorkerStream:
    """Reads a handle's iterator, one output ahead when asked to: so that an arrival is timed when it happens, not when
    the client's side gets round to it, and two streams can be watched at once."""

    def __init__(
        self, outputs: AsyncIterator[TokenOutput], worker: RegisteredWorker, clock: Clock, deadline: Deadline
    ) -> None:
        self.worker = worker
        self._outputs = outputs
        self._clock = clock
        self._deadline = deadline
        self._ahead: asyncio.Task[Arrival] | None = None

    def read_ahead(self) -> asyncio.Task[Arrival]:
        """Begin to read the next output, if that has not begun."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._read())
        return self._ahead

    async def next(self) -> Arrival:
        """The next output. `WorkerLost` if the stream ends without saying how, `DeadlineExceeded` in time."""
        doing = f"waiting for worker {self.worker.worker_id}"
        if self._ahead is not None:
            task, self._ahead = self._ahead, None
            return await self._deadline.bound(task, doing)
        return await self._deadline.bound(self._read(), doing)

    def cancel(self) -> None:
        """Stop what reads ahead; `close` then waits for it."""
        if self._ahead is not None and not self._ahead.cancelling():  # twice would break off its own clean-up
            self._ahead.cancel()

    async def close(self) -> None:
        """Stop reading (the worker goes on until it is told to abort)."""
        self.cancel()
        if self._ahead is not None:
            await asyncio.wait({self._ahead})
            if not self._ahead.cancelled():
                self._ahead.exception()  # it lost a race that is decided already
            self._ahead = None
        aclose = getattr(self._outputs, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(RuntimeError):  # a reader that is still being cancelled closes it itself
                await aclose()

    async def _read(self) -> Arrival:
        async for output in self._outputs:
            return Arrival(output, self._clock.now())
        raise WorkerLost(f"worker {self.worker.worker_id} ended the request without saying how")
