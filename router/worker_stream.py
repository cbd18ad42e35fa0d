"""The outputs of one worker for one request, buffered until the client reads them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pdserve.core.clock import Clock
from pdserve.core.worker import TokenOutput
from router.arrivals import Arrivals
from router.registered_worker import RegisteredWorker


class Arrival(NamedTuple):
    """An output, and the time it reached the router in seconds of the gateway's clock."""

    output: TokenOutput
    time_s: float


class ReaderStalled(Exception):
    """No more outputs are taken, because the client left ``max_unread`` unread."""


class WorkerStream:
    """Takes the outputs of ``worker`` as they arrive (`pdserve.core.worker.OutputSink`), so that arrivals are timed
    independently of the client. Outputs wait while a burst of requests is accepted (`router.arrivals`).

    ``on_arrival`` is called for each output, ``on_change`` when `next` can return or raise. After `limit_unread`, no
    more outputs are taken when so many are unread: ``on_stall`` is called, and `next` raises `ReaderStalled` after the
    last of them.
    """

    __slots__ = (
        "_arrivals",
        "_clock",
        "_end",
        "_held",
        "_max_unread",
        "_on_arrival",
        "_on_change",
        "_on_stall",
        "_unread",
        "worker",
    )

    def __init__(
        self,
        worker: RegisteredWorker,
        clock: Clock,
        arrivals: Arrivals,
        *,
        on_arrival: Callable[[TokenOutput], None],
        on_change: Callable[[], None],
        on_stall: Callable[[], None],
    ) -> None:
        self.worker = worker
        self._clock = clock
        self._arrivals = arrivals
        self._max_unread = math.inf
        self._on_arrival = on_arrival
        self._on_change = on_change
        self._on_stall = on_stall
        self._unread: deque[Arrival] = deque()
        self._held: deque[Callable[[], None]] = deque()  # during a burst
        self._end: Exception | None = None  # the reason why no more outputs are taken

    @property
    def has_output(self) -> bool:
        """Whether an output is unread."""
        return bool(self._unread)

    @property
    def has_failed(self) -> bool:
        """Whether no more outputs will come and none is unread."""
        return self._end is not None and not self._unread

    @property
    def has_changed(self) -> bool:
        """Whether `next` returns or raises something."""
        return bool(self._unread) or self._end is not None

    def next(self) -> Arrival | None:
        """The next output; None if there is none yet. Raises the error of the stream, or `ReaderStalled`, after the
        last output."""
        if self._unread:
            return self._unread.popleft()
        if self._end is not None:
            raise self._end
        return None

    def output(self, output: TokenOutput) -> None:
        """See `pdserve.core.worker.OutputSink`."""
        arrival = Arrival(output, self._clock.now())
        self._act(lambda: self._take(arrival))

    def failed(self, error: Exception) -> None:
        """See `pdserve.core.worker.OutputSink`."""
        self._act(lambda: self._fail(error))

    def limit_unread(self, most: int) -> None:
        """Keep at most so many outputs unread."""
        self._max_unread = most
        self._look_for_stall()

    def close(self) -> None:
        """Take nothing more. The worker continues until it gets an abort."""
        if self._end is None:
            self._end = ReaderStalled("it was closed")
        self._held.clear()

    def _take(self, arrival: Arrival) -> None:
        self._unread.append(arrival)
        self._on_arrival(arrival.output)
        self._look_for_stall()
        self._on_change()

    def _look_for_stall(self) -> None:
        unread = len(self._unread)
        if unread >= self._max_unread and self._end is None and self._unread[-1].output.finish_reason is None:
            self._end = ReaderStalled(f"{unread} outputs are unread")
            self._on_stall()

    def _fail(self, error: Exception) -> None:
        self._end = error
        self._on_change()

    def _act(self, act: Callable[[], None]) -> None:
        if self._held or self._arrivals.is_burst:
            if not self._held:
                self._arrivals.when_settled(self._release)
            self._held.append(act)
        elif self._end is None:
            act()

    def _release(self) -> None:
        held = self._held
        while held and self._end is None:
            held.popleft()()
        held.clear()
