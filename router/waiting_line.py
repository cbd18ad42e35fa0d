"""The queue of requests that wait for a free worker: by priority, then the clients by turns."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

import msgspec

from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, LayoutMismatch, NotReady
from pdserve.core.request import AGED_S, Mode, counted_requests
from pdserve.core.worker import Role
from router.fair_queue import AGED_EVERY, FairQueue, Turns
from router.forecast import earliest_finish_s
from router.placement import Decision, Never, Placed, Wait, place
from router.queue_shares import QueueShares
from router.registry import Assignment, WorkerRegistry
from router.view import WaitMode
from router.waiting import Waiting

log = logging.getLogger(__name__)

DRAIN_SAMPLES = 64
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
LOOK_AHEAD_S = 60.0  # a deadline further away is not compared while nothing waits
LOOK_FOR_AGED_S = 1.0


class _Queue(FairQueue):
    """The requests of one mode."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns)
        self.check_s = 0.0  # time at which to check the patience of requests again
        self.unavailable_since_s: float | None = None
        self.short_of: Role | None = None  # what its next request waited for the last time


class WaitingLine:
    """The router's queue. `router.placement.place` chooses workers; a request leaves the line when its load is added to
    them. `router.fair_queue` decides which one is next."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, clock: Clock) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock
        turns = Turns()
        modes: tuple[WaitMode, ...] = (Mode.PD, Mode.COLOCATED, Mode.AUTO)
        self._queues: dict[WaitMode, _Queue] = {mode: _Queue(turns) for mode in modes}
        self._shares = QueueShares()
        self._drained: deque[tuple[float, int]] = deque(maxlen=DRAIN_SAMPLES)  # when requests were placed, and tokens
        self._serving = False
        self._served_since_aged = 0
        self._aged: tuple[WaitMode, Waiting] | None = None  # it comes before earlier priorities
        self._look_for_aged_s = 0.0
        registry.subscribe(self._serve)

    @property
    def length(self) -> int:
        """Number of waiting requests."""
        return sum(queue.length for queue in self._queues.values())

    @property
    def tokens(self) -> int:
        """Tokens of the waiting requests: their prompts, and what they may generate."""
        return sum(queue.tokens for queue in self._queues.values())

    @property
    def short_of(self) -> Role | None:
        """The role whose workers the next requests wait for. None if nothing waits, or for something else."""
        return next((queue.short_of for queue in self._queues.values() if queue.length and queue.short_of), None)

    def refusal(self, client: str) -> CapacityExceeded | None:
        """The error for a request of ``client`` that arrives now, whose tokens are not known yet; None if the line may
        have room for it."""
        if self.length >= self._config.max_queue:
            return self.too_many() if self._shares.way_for(client) is None else None
        if (excess := self._excess_tokens(1)) > 0 and self._shares.way_for_tokens(client, 1, excess) is None:
            return self._too_many_tokens(1)
        return None

    def too_many(self) -> CapacityExceeded:
        """The error for a request that arrives when too many others wait."""
        most = self._config.max_queue
        waiting = f"{counted_requests(most)} {'is' if most == 1 else 'are'}"
        return CapacityExceeded(
            f"queue: {waiting} waiting (router.max_queue); try again later",
            retry_after_s=self._retry_after_s(self.length / 4, 0),
        )

    def _too_many_tokens(self, tokens: int) -> CapacityExceeded:
        waiting, most = self.tokens, self._config.max_queue_tokens
        return CapacityExceeded(
            f"queue: the waiting requests have {waiting} tokens, and at most {most} may wait "
            "(router.max_queue_tokens); try again later",
            retry_after_s=self._retry_after_s(0, max(waiting / 4, waiting + tokens - most)),
        )

    def _excess_tokens(self, tokens: int) -> int:
        """How many tokens too many would wait with so many more; an empty line has room for any."""
        return self.tokens + tokens - self._config.max_queue_tokens if self.length else 0

    def _make_room(self, waiting: Waiting) -> None:
        """Make room for a request that has to wait: refuse requests of the client that has the most of the full line,
        whatever their priority. `CapacityExceeded` if that is its own client."""
        way: list[Waiting] = []
        if self.length >= self._config.max_queue:
            if (found := self._shares.way_for(waiting.holder)) is None:
                raise self.too_many()
            way = found
        if (excess := self._excess_tokens(waiting.tokens) - sum(each.tokens for each in way)) > 0:
            found = self._shares.way_for_tokens(waiting.holder, waiting.tokens, excess, way)
            if found is None:
                raise self._too_many_tokens(waiting.tokens)
            way = [*way, *found]
        for each in way:
            self._turn_out(each)

    def _turn_out(self, waiting: Waiting) -> None:
        waiting.placed.set_exception(
            CapacityExceeded(
                "queue: it is full (router.max_queue, router.max_queue_tokens), and a client with fewer requests in it "
                "came; try again later",
                retry_after_s=self._retry_after_s(self.length / 4, 0),
            )
        )
        self._left(waiting)

    def check_deadline(self, waiting: Waiting, left_s: float) -> None:
        """Raise `DeadlineExceeded` if the request, with so many seconds left, is sure to be late by the cost model."""
        if not (self.length or left_s < LOOK_AHEAD_S):
            return
        view = self._registry.view()
        if earliest_finish_s(waiting.needs, view, self.tokens) <= left_s:
            return
        # Of those that wait, at least the client's own come first, in its order.
        before = self._queues[waiting.needs.mode].prompt_tokens_before(waiting.client, waiting.priority)
        least_s = earliest_finish_s(waiting.needs, view, before)
        if least_s > left_s:
            queued = f", after {before} prompt tokens that wait before it" if before else ""
            raise DeadlineExceeded(
                f"deadline: {left_s:.3g} s are left, and by the costs measured here the request takes at least "
                f"{least_s:.3g} s{queued}; raise the timeout or reduce the load"
            )

    async def wait(self, waiting: Waiting) -> Assignment:
        """Wait for free workers.

        Raises `CapacityExceeded` if no worker can hold the request, or the line is full. Raises `NotReady` or
        `LayoutMismatch` if workers are missing and the request is not patient: at once if they were never there, else
        after ``router.patience_s``, or never without one.
        """
        mode = waiting.needs.mode
        queue = self._queues[mode]
        decision = self._decide(waiting)
        if isinstance(decision, Never):
            raise decision.error
        if isinstance(decision, Placed) and not queue.length:
            return self._assign(waiting, decision)
        if not waiting.patient:
            if isinstance(decision, Wait) and decision.error and not self._may_come_back(mode, decision.error):
                raise decision.error
            self._make_room(waiting)
        if isinstance(decision, Wait):
            log.debug("a request waits: %s", decision.reason)
            if not queue.length:
                queue.short_of = decision.short_of
        waiting.since_s = self._clock.now()
        queue.push(waiting)
        self._shares.join(waiting)
        if isinstance(decision, Placed) or decision.error:  # else the line waits for a change
            self._serve()
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.cancelled() or not waiting.placed.done():
                waiting.placed.cancel()
                self._left(waiting)
            elif waiting.placed.exception() is None:
                # The request was placed just before the wait was cancelled.
                waiting.placed.result().end()
            raise

    def _left(self, waiting: Waiting) -> None:
        """Remove a request that was not placed. Its future must be done."""
        self._queues[waiting.needs.mode].left(waiting)
        self._shares.leave(waiting)

    def _decide(self, waiting: Waiting) -> Decision:
        """Where the request can go now."""
        if waiting.prompt is not None and (cached := waiting.prompt.cached()) is not waiting.needs.cached:
            waiting.needs = msgspec.structs.replace(waiting.needs, cached=cached)
        return place(waiting.needs, self._registry.view())

    def _assign(self, waiting: Waiting, placed: Placed) -> Assignment:
        self._drained.append((self._clock.now(), waiting.tokens))
        return self._registry.assign(waiting.needs, placed)

    def _serve(self) -> None:
        """Place as many as possible, in the order of the queues. A request that has to wait keeps back all others of
        its mode."""
        if self._serving or not self.length:  # placing changes the registry, which calls this method again
            return
        self._serving = True
        try:
            queues = dict(self._queues)
            while heads := {mode: head for mode, queue in queues.items() if (head := queue.head) is not None}:
                mode, (key, waiting) = min(heads.items(), key=lambda entry: entry[1][0])
                priority = key[0]
                if (aged := self._find_aged(queues, priority)) is not None:
                    mode, waiting = aged
                decision = self._decide(waiting)
                if isinstance(decision, Wait):
                    queues[mode].short_of = decision.short_of
                    self._refuse(mode, queues.pop(mode), decision.error)
                elif isinstance(decision, Placed):
                    waiting.placed.set_result(self._assign(waiting, decision))
                    queues[mode].served(waiting)
                    self._shares.leave(waiting)
                    self._served_since_aged = 0 if waiting.priority > priority else self._served_since_aged + 1
                    waiting.priority = min(waiting.priority, priority)
                else:
                    waiting.placed.set_exception(decision.error)
                    self._left(waiting)
        finally:
            self._serving = False

    def _find_aged(self, queues: Mapping[WaitMode, _Queue], first: int) -> tuple[WaitMode, Waiting] | None:
        """The request that comes next although its priority is later than ``first``, because it is its turn
        (`router.fair_queue.AGED_EVERY`); None if there is none."""
        if self._served_since_aged < AGED_EVERY - 1:
            return None
        now_s = self._clock.now()
        if self._aged is None or self._aged[1].placed.done():
            self._aged = None
            if now_s < self._look_for_aged_s:
                return None
            found = [(mode, aged) for mode, queue in queues.items() if (aged := queue.longest_waiting(first))]
            oldest = min(found, key=lambda entry: entry[1].since_s, default=None)
            if oldest is None or now_s - oldest[1].since_s < AGED_S:
                self._look_for_aged_s = now_s + LOOK_FOR_AGED_S
                return None
            self._aged = oldest
        return self._aged if self._aged[0] in queues else None

    # --- requests that cannot be placed -------------------------------------------------------------------------------

    def _refuse(self, mode: WaitMode, queue: _Queue, error: NotReady | LayoutMismatch | None) -> None:
        """Refuse the requests that have waited too long for a missing worker, if ``error`` says that one is missing."""
        now_s = self._clock.now()
        if error is None:
            queue.unavailable_since_s = None
            return
        if queue.unavailable_since_s is None:
            queue.unavailable_since_s = queue.check_s = now_s
        may_come_back, patience_s = self._may_come_back(mode, error), self._config.patience_s
        if may_come_back and (patience_s is None or now_s < queue.check_s):
            return
        patience_s = patience_s or 0.0
        next_s = float("inf")
        for waiting in queue.waiting():
            if waiting.patient:
                continue
            until_s = max(waiting.since_s, queue.unavailable_since_s) + patience_s
            if may_come_back and now_s < until_s:
                next_s = min(next_s, until_s)
                continue
            waiting.placed.set_exception(type(error)(*error.args))
            self._left(waiting)
        if next_s < float("inf"):
            queue.check_s = next_s
            asyncio.get_running_loop().call_later(next_s - now_s + 0.001, self._serve)

    def _may_come_back(self, mode: WaitMode, error: NotReady | LayoutMismatch) -> bool:
        """Whether waiting may help: missing workers may come back, but a layout mismatch stays."""
        return self._registry.was_available(mode) and not isinstance(error, LayoutMismatch)

    def _retry_after_s(self, requests: float, tokens: float) -> float:
        """Seconds until so many requests and tokens have left the line, at the current rate."""
        if not self._drained:
            return 1.0
        seconds = max(self._clock.now() - self._drained[0][0], 1e-3)
        rates = len(self._drained) / seconds, sum(tokens for _, tokens in self._drained) / seconds
        return min(max(requests / rates[0], tokens / rates[1], MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
