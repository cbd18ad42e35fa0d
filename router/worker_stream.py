"""The outputs of one worker for one request, buffered until the client reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError, WorkerLost
from pdserve.core.worker import TokenOutput
from router.arrivals import Arrivals
from router.registered_worker import RegisteredWorker
from router.request_record import Deadline


class Arrival(NamedTuple):
    """An output, and the time it reached the router in seconds of the gateway's clock."""

    output: TokenOutput
    time_s: float


class ReaderStalled(Exception):
    """Reading has ended because the client left ``max_unread`` outputs unread."""


class WorkerStream:
    """Reads ``outputs`` in its own task, so that arrivals are timed independently of the client. Outputs wait while a
    burst of requests is accepted (`router.arrivals`).

    ``on_arrival`` is called for each output. When ``max_unread`` outputs are unread, reading ends: ``on_stall`` is
    called, and `next` raises `ReaderStalled` after the last of them.
    """

    def __init__(
        self,
        outputs: AsyncIterator[TokenOutput],
        worker: RegisteredWorker,
        clock: Clock,
        deadline: Deadline,
        arrivals: Arrivals,
        *,
        max_unread: int,
        on_arrival: Callable[[TokenOutput], None],
        on_stall: Callable[[], None],
    ) -> None:
        self.worker = worker
        self._outputs = outputs
        self._clock = clock
        self._guard = deadline.guard(f"waiting for worker {worker.worker_id}")
        self._arrivals = arrivals
        self._max_unread = max_unread
        self._on_arrival = on_arrival
        self._on_stall = on_stall
        self._unread: deque[Arrival] = deque()
        self._end: Exception | None = None  # the reason why no more outputs will come
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def has_output(self) -> bool:
        """Whether an output is unread."""
        return bool(self._unread)

    @property
    def has_failed(self) -> bool:
        """Whether no more outputs will come and none is unread."""
        return self._end is not None and not self._unread

    async def wait_changed(self) -> None:
        """Wait until `next` can return or raise at once."""
        while not self._unread and self._end is None:
            self._changed.clear()
            await self._changed.wait()

    async def next(self) -> Arrival:
        """The next output. Raises the worker's error, `WorkerLost` if the stream ends without a finish reason,
        `DeadlineExceeded`, or `ReaderStalled` after the last buffered output."""
        if not self._unread and self._end is None:
            await self._guard.bound(self.wait_changed())
        if self._unread:
            return self._unread.popleft()
        assert self._end is not None, "wait_changed returned without a change"
        raise self._end

    def cancel(self) -> None:
        """Stop reading. `close` waits for the end."""
        if (
            not self._reading.done() and not self._reading.cancelling()
        ):  # a second cancellation would interrupt its clean-up
            self._reading.cancel()

    async def close(self) -> None:
        """Stop reading. The worker continues until it gets an abort."""
        self._guard.close()
        self.cancel()
        await asyncio.wait({self._reading})
        aclose = getattr(self._outputs, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(RuntimeError):  # the reading task is closing it
                await aclose()
        if not self._reading.cancelled():
            self._reading.result()

    async def _read(self) -> None:
        try:
            async for output in self._outputs:
                arrived_s = self._clock.now()
                if self._arrivals.is_burst:
                    await self._arrivals.settled()
                self._unread.append(Arrival(output, arrived_s))
                self._changed.set()
                self._on_arrival(output)
                if output.finish_reason is not None:
                    break
                if len(self._unread) >= self._max_unread:
                    self._end = ReaderStalled(f"{self._max_unread} outputs are unread")
                    self._on_stall()
                    return
            self._end = WorkerLost(f"worker {self.worker.worker_id} ended the stream without a finish reason")
        except PdserveError as error:
            self._end = error
        except Exception as error:
            self._end = error
            raise
        finally:
            self._changed.set()
