"""One worker's outputs for one request: read as they arrive, kept until the client's side takes them."""

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
    """An output and when it reached the router (seconds of the gateway's clock)."""

    output: TokenOutput
    time_s: float


class ReaderStalled(Exception):
    """The client has left ``max_unread`` outputs unread; the worker's next ones were not taken."""


class WorkerStream:
    """Reads a handle's iterator in a task of its own, so that an arrival is timed and counted when it happens, not when
    the client takes it. Outputs wait while a burst of requests is taken in (`router.arrivals`).

    ``on_arrival`` is called for each output. When ``max_unread`` outputs wait, reading ends: ``on_stall`` is called,
    and `next` raises `ReaderStalled` after the last of them.
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
        self._deadline = deadline
        self._arrivals = arrivals
        self._max_unread = max_unread
        self._on_arrival = on_arrival
        self._on_stall = on_stall
        self._unread: deque[Arrival] = deque()
        self._end: Exception | None = None  # why no more outputs will come
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def has_output(self) -> bool:
        """Whether an output is unread."""
        return bool(self._unread)

    @property
    def has_failed(self) -> bool:
        """Whether nothing more will come, and nothing is unread."""
        return self._end is not None and not self._unread

    async def wait_changed(self) -> None:
        """Return when there is something that `next` has not given yet: an output, or why there is none."""
        while not self._unread and self._end is None:
            self._changed.clear()
            await self._changed.wait()

    async def next(self) -> Arrival:
        """The next output. `WorkerLost` if the stream ends without saying how, `DeadlineExceeded` in time,
        `ReaderStalled` after the outputs that were left unread too long, or what the worker raised."""
        if not self._unread and self._end is None:
            await self._deadline.bound(self.wait_changed(), f"waiting for worker {self.worker.worker_id}")
        if self._unread:
            return self._unread.popleft()
        assert self._end is not None, "a change is an output or an end"
        raise self._end

    def cancel(self) -> None:
        """Stop reading; `close` then waits for it."""
        if not self._reading.done() and not self._reading.cancelling():  # twice would break off its own clean-up
            self._reading.cancel()

    async def close(self) -> None:
        """Stop reading (the worker goes on until it is told to abort)."""
        self.cancel()
        await asyncio.wait({self._reading})
        aclose = getattr(self._outputs, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(RuntimeError):  # a reader that is still being cancelled closes it itself
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
            self._end = WorkerLost(f"worker {self.worker.worker_id} ended the request without saying how")
        except PdserveError as error:
            self._end = error
        except Exception as error:
            self._end = error
            raise
        finally:
            self._changed.set()
