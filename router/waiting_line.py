"""The queue of requests that wait for a free worker: first come, first served."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, LayoutMismatch, NotReady
from pdserve.core.request import Mode
from router.placement import Needs, Never, Placed, Wait, WaitMode, place
from router.registry import Assignment, WorkerRegistry

log = logging.getLogger(__name__)

DRAIN_SAMPLES = 64
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0


@dataclass(slots=True, order=True)
class Waiting:
    """A request in the line. ``order`` is its position, which a retry keeps. A ``patient`` request (a retry) waits
    for a missing worker until its deadline, others for ``router.patience_s``."""

    order: int
    needs: Needs = field(compare=False)
    patient: bool = field(compare=False, default=False)
    since_s: float = field(compare=False, default=0.0)
    placed: asyncio.Future[Assignment] = field(compare=False, default_factory=asyncio.Future)


class _Line:
    """The requests of one mode, oldest first. A request that leaves early stays in the heap until it is at the front,
    or until such requests are the majority."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self.length = 0
        self.check_s = 0.0  # time at which to check the patience of requests again
        self.unavailable_since_s: float | None = None

    @property
    def head(self) -> Waiting | None:
        """The oldest waiting request."""
        while self._heap and self._heap[0].placed.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def push(self, waiting: Waiting) -> None:
        """Add a request."""
        heapq.heappush(self._heap, waiting)
        self.length += 1

    def left(self) -> None:
        """Note that a request was placed, refused or cancelled. Its future must be done."""
        self.length -= 1
        if len(self._heap) > 2 * self.length + 16:
            self._heap = self.waiting()
            heapq.heapify(self._heap)

    def waiting(self) -> list[Waiting]:
        """The waiting requests, in no order."""
        return [waiting for waiting in self._heap if not waiting.placed.done()]


class WaitingLine:
    """The router's queue. `router.placement.place` chooses workers; a request leaves the line when its load is added to
    them."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, clock: Clock) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock
        self._lines: dict[WaitMode, _Line] = {Mode.PD: _Line(), Mode.COLOCATED: _Line(), Mode.AUTO: _Line()}
        self._placed_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)
        self._serving = False
        registry.subscribe(self._serve)

    @property
    def length(self) -> int:
        """Number of waiting requests."""
        return sum(line.length for line in self._lines.values())

    @property
    def is_full(self) -> bool:
        """Whether ``router.max_queue`` requests wait."""
        return self.length >= self._config.max_queue

    def refusal(self) -> CapacityExceeded:
        """The error for a request that arrives when the line is full."""
        return CapacityExceeded(
            f"queue: {self._config.max_queue} requests are waiting (router.max_queue); try again later",
            retry_after_s=self._retry_after_s(),
        )

    async def wait(self, waiting: Waiting) -> Assignment:
        """Wait for free workers.

        Raises `CapacityExceeded` if no worker can hold the request, or the line is full. Raises `NotReady` or
        `LayoutMismatch` if workers are missing and the request is not patient: at once if they were never there, else
        after ``router.patience_s``.
        """
        mode = waiting.needs.mode
        line = self._lines[mode]
        decision = place(waiting.needs, self._registry.view())
        if isinstance(decision, Never):
            raise decision.error
        if isinstance(decision, Placed) and not line.length:
            return self._assign(waiting, decision)
        if not waiting.patient:
            if self.is_full:
                raise self.refusal()
            if isinstance(decision, Wait) and decision.error and not self._may_come_back(mode, decision.error):
                raise decision.error
        if isinstance(decision, Wait):
            log.debug("a request waits: %s", decision.reason)
        waiting.since_s = self._clock.now()
        line.push(waiting)
        self._serve()
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.cancelled() or not waiting.placed.done():
                waiting.placed.cancel()
                line.left()
            elif waiting.placed.exception() is None:
                # The request was placed just before the wait was cancelled.
                waiting.placed.result().end()
            raise

    def _assign(self, waiting: Waiting, placed: Placed) -> Assignment:
        self._placed_s.append(self._clock.now())
        return self._registry.assign(waiting.needs, placed)

    def _serve(self) -> None:
        """Place as many as possible, oldest first. Requests of one mode never overtake each other."""
        if self._serving:  # placing changes the registry, which calls this method again
            return
        self._serving = True
        try:
            lines = dict(self._lines)
            while heads := {mode: head for mode, line in lines.items() if (head := line.head) is not None}:
                mode, waiting = min(heads.items(), key=lambda entry: entry[1])
                decision = place(waiting.needs, self._registry.view())
                if isinstance(decision, Wait):
                    self._refuse(mode, lines.pop(mode), decision.error)
                    continue
                if isinstance(decision, Placed):
                    waiting.placed.set_result(self._assign(waiting, decision))
                else:
                    waiting.placed.set_exception(decision.error)
                lines[mode].left()
        finally:
            self._serving = False

    # --- requests that cannot be placed -------------------------------------------------------------------------------

    def _refuse(self, mode: WaitMode, line: _Line, error: NotReady | LayoutMismatch | None) -> None:
        """Refuse the requests that have waited too long for a missing worker, if ``error`` says that one is missing."""
        now_s = self._clock.now()
        if error is None:
            line.unavailable_since_s = None
            return
        if line.unavailable_since_s is None:
            line.unavailable_since_s = line.check_s = now_s
        may_come_back = self._may_come_back(mode, error)
        if may_come_back and now_s < line.check_s:
            return
        next_s = float("inf")
        for waiting in line.waiting():
            if waiting.patient:
                continue
            until_s = max(waiting.since_s, line.unavailable_since_s) + self._config.patience_s
            if may_come_back and now_s < until_s:
                next_s = min(next_s, until_s)
                continue
            waiting.placed.set_exception(type(error)(*error.args))
            line.left()
        if next_s < float("inf"):
            line.check_s = next_s
            asyncio.get_running_loop().call_later(next_s - now_s + 0.001, self._serve)

    def _may_come_back(self, mode: WaitMode, error: NotReady | LayoutMismatch) -> bool:
        """Whether waiting may help: missing workers may come back, but a layout mismatch stays."""
        return self._registry.was_available(mode) and not isinstance(error, LayoutMismatch)

    def _retry_after_s(self) -> float:
        """Seconds until a quarter of the line has left, at the current rate."""
        if not self._placed_s:
            return 1.0
        rate = len(self._placed_s) / max(self._clock.now() - self._placed_s[0], 1e-3)
        return min(max(self.length / 4 / rate, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
