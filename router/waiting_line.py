"""The queue of requests that wait for a free worker: by priority, then the clients by turns."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, LayoutMismatch, NotReady, PdserveError
from pdserve.core.request import AGED_S, Mode, counted
from pdserve.core.worker import Role
from router.cost_model import Line
from router.fair_queue import AGED_EVERY, FairQueue, Waiting
from router.placement import Decision, Never, Placed, Wait, place
from router.registry import Assignment, WorkerRegistry
from router.view import ClusterView, Needs, WaitMode

log = logging.getLogger(__name__)

DRAIN_SAMPLES = 64
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
"""Limit: `retry-after` of a full queue."""
LOOK_AHEAD_S = 60.0  # a deadline further away is not compared while nothing waits
LOOK_FOR_AGED_S = 1.0
COMPARE_ALL_S = 0.02
"""How often the next request is compared with all workers, where a part of them is compared after each change."""
CAUTION = 0.5
"""A prediction, less its margin, counts by this share: only requests that are sure to be late are refused."""


class WaitingLine:
    """The router's queue. `router.placement.place` chooses workers; a request leaves the line when its load is added to
    them. `router.fair_queue` decides which one is next."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, clock: Clock) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock
        self._queue = FairQueue()
        self._short_of: dict[WaitMode, Role | None] = {}  # what the next request waited for the last time
        self._unavailable_since_s: dict[WaitMode, float] = {}
        self._check_s: dict[WaitMode, float] = {}  # when to check the patience of requests again
        self._compare_all_s: dict[WaitMode, float] = {}  # when to compare the next request with all workers again
        self._drained: deque[tuple[float, int]] = deque(maxlen=DRAIN_SAMPLES)  # when requests were placed, and tokens
        self._serving = False
        self._served_since_aged = 0
        self._aged: Waiting | None = None  # it comes before earlier priorities
        self._look_for_aged_s = 0.0
        registry.subscribe(self._serve)

    @property
    def length(self) -> int:
        """Number of waiting requests."""
        return self._queue.lengths.total()

    @property
    def short_of(self) -> Role | None:
        """The role whose workers the next requests wait for. None if nothing waits, or for something else."""
        return next((role for mode, role in self._short_of.items() if role and self._queue.lengths[mode]), None)

    def refusal(self, client: str) -> CapacityExceeded | None:
        """The error for a request of ``client`` that arrives now, whose tokens are not known yet; None if the line may
        have room for it."""
        if self.length >= self._config.max_queue:
            return self.too_many() if self._queue.way_for(client) is None else None
        if (excess := self._excess_tokens(1)) > 0 and self._queue.way_for_tokens(client, 1, excess) is None:
            return self._too_many_tokens(1)
        return None

    def too_many(self) -> CapacityExceeded:
        """The error for a request that arrives when too many others wait."""
        most = self._config.max_queue
        waiting = f"{counted(most, 'request')} {'is' if most == 1 else 'are'}"
        return CapacityExceeded(
            f"queue: {waiting} waiting (router.max_queue); try again later",
            retry_after_s=self._retry_after_s(self.length / 4, 0),
        )

    def _too_many_tokens(self, tokens: int) -> CapacityExceeded:
        waiting, most = self._queue.tokens, self._config.max_queue_tokens
        return CapacityExceeded(
            f"queue: the waiting requests have {waiting} tokens, and at most {most} may wait "
            "(router.max_queue_tokens); try again later",
            retry_after_s=self._retry_after_s(0, max(waiting / 4, waiting + tokens - most)),
        )

    def _excess_tokens(self, tokens: int) -> int:
        """How many tokens too many would wait with so many more; an empty line has room for any."""
        return self._queue.tokens + tokens - self._config.max_queue_tokens if self.length else 0

    def _make_room(self, waiting: Waiting) -> None:
        """Make room for a request that has to wait: refuse requests of the client that has the most of the full line,
        whatever their priority. `CapacityExceeded` if that is its own client."""
        way: Sequence[Waiting] = ()
        if self.length >= self._config.max_queue:
            if (found := self._queue.way_for(waiting.holder)) is None:
                raise self.too_many()
            way = found
        excess = self._excess_tokens(waiting.tokens)
        more = self._queue.way_for_tokens(waiting.holder, waiting.tokens, excess, way)
        if more is None:
            raise self._too_many_tokens(waiting.tokens)
        for each in (*way, *more):
            self._refuse(
                each,
                CapacityExceeded(
                    "queue: it is full (router.max_queue, router.max_queue_tokens), and a client with fewer requests "
                    "in it came; try again later",
                    retry_after_s=self._retry_after_s(self.length / 4, 0),
                ),
            )

    def _refuse(self, waiting: Waiting, error: PdserveError) -> None:
        waiting.placed.set_exception(error)
        self._queue.left(waiting)

    def check_deadline(self, waiting: Waiting, left_s: float) -> None:
        """Raise `DeadlineExceeded` if the request, with so many seconds left, is sure to be late by the cost model."""
        if not (self.length or left_s < LOOK_AHEAD_S):
            return
        view = self._registry.view()
        if earliest_finish_s(waiting.needs, view, self._queue.tokens) <= left_s:
            return
        # Of those that wait, at least the client's own come first, in its order.
        before = self._queue.prompt_tokens_before(waiting)
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
        behind = self._queue.lengths[mode] > 0  # it has to wait anyway
        decision = self._decide(waiting, part_only=behind)
        if isinstance(decision, Never):
            raise decision.error
        if isinstance(decision, Placed) and not behind:
            return self._assign(waiting, decision)
        if not waiting.patient:
            if isinstance(decision, Wait) and decision.error and not self._may_come_back(mode, decision.error):
                raise decision.error
            self._make_room(waiting)
        if isinstance(decision, Wait):
            log.debug("a request waits: %s", decision.reason)
            if not self._queue.lengths[mode]:
                self._short_of[mode] = decision.short_of
        waiting.since_s = self._clock.now()
        self._queue.push(waiting)
        if isinstance(decision, Placed) or decision.error:  # else the line waits for a change
            self._serve()
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.cancelled() or not waiting.placed.done():
                waiting.placed.cancel()
                self._queue.left(waiting)
            elif waiting.placed.exception() is None:
                # The request was placed just before the wait was cancelled.
                waiting.placed.result().end()
            raise

    def _decide(self, waiting: Waiting, part_only: bool = False) -> Decision:
        """Where the request can go now. With ``part_only`` it is compared with all workers only if those that are drawn
        for it could not take it later either."""
        if waiting.prompt is not None and (cached := waiting.prompt.cached()) is not waiting.needs.cached:
            waiting.needs = msgspec.structs.replace(waiting.needs, cached=cached)
        part = self._registry.sample(waiting.needs)
        if part is not None:
            decision = place(waiting.needs, part)
            if isinstance(decision, Placed) and not decision.unpaired:
                return decision
            if part_only and isinstance(decision, Wait) and decision.error is None:
                return decision
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
            modes: set[WaitMode] = {Mode.PD, Mode.COLOCATED, Mode.AUTO}
            while (waiting := self._queue.head(modes)) is not None:
                priority = waiting.priority
                waiting = self._find_aged(modes, priority) or waiting
                mode, now_s = waiting.needs.mode, self._clock.now()
                compares_all = now_s >= self._compare_all_s.get(mode, 0.0)
                decision = self._decide(waiting, part_only=not compares_all)
                if isinstance(decision, Wait):
                    if compares_all and self._registry.is_sampled:
                        self._compare_all_s[mode] = now_s + COMPARE_ALL_S
                        asyncio.get_running_loop().call_later(COMPARE_ALL_S + 0.001, self._serve)
                    self._short_of[mode] = decision.short_of
                    modes.remove(mode)
                    self._refuse_impatient(mode, decision.error)
                elif isinstance(decision, Placed):
                    waiting.placed.set_result(self._assign(waiting, decision))
                    self._queue.served(waiting)
                    self._served_since_aged = 0 if waiting.priority > priority else self._served_since_aged + 1
                    waiting.priority = min(waiting.priority, priority)
                else:
                    self._refuse(waiting, decision.error)
        finally:
            self._serving = False

    def _find_aged(self, modes: Collection[WaitMode], first: int) -> Waiting | None:
        """The request that comes next although its priority is later than ``first``, because it is its turn
        (`router.fair_queue.AGED_EVERY`); None if there is none."""
        if self._served_since_aged < AGED_EVERY - 1:
            return None
        now_s = self._clock.now()
        if self._aged is None or self._aged.placed.done():
            self._aged = None
            if now_s < self._look_for_aged_s:
                return None
            oldest = self._queue.longest_waiting(modes, first)
            if oldest is None or now_s - oldest.since_s < AGED_S:
                self._look_for_aged_s = now_s + LOOK_FOR_AGED_S
                return None
            self._aged = oldest
        return self._aged if self._aged.needs.mode in modes else None

    # --- requests that cannot be placed -------------------------------------------------------------------------------

    def _refuse_impatient(self, mode: WaitMode, error: NotReady | LayoutMismatch | None) -> None:
        """Refuse the requests that have waited too long for a missing worker, if ``error`` says that one is missing."""
        now_s = self._clock.now()
        if error is None:
            self._unavailable_since_s.pop(mode, None)
            return
        if mode not in self._unavailable_since_s:
            self._unavailable_since_s[mode] = self._check_s[mode] = now_s
        may_come_back, patience_s = self._may_come_back(mode, error), self._config.patience_s
        if may_come_back and (patience_s is None or now_s < self._check_s[mode]):
            return
        next_s = float("inf")
        for waiting in self._queue.waiting(mode):
            until_s = max(waiting.since_s, self._unavailable_since_s[mode]) + (patience_s or 0.0)
            if waiting.patient:
                continue
            if may_come_back and now_s < until_s:
                next_s = min(next_s, until_s)
            else:
                self._refuse(waiting, type(error)(*error.args))
        if next_s < float("inf"):
            self._check_s[mode] = next_s
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


# --- the earliest end of a request -----------------------------------------------------------------------------------


def earliest_finish_s(needs: Needs, view: ClusterView, tokens_before: int = 0) -> float:
    """Seconds within which the request cannot end: the prompts before it on all workers together, its own prompt, and
    the outputs that it generates for sure, each on the fastest worker. 0 where too little is measured to tell.

    ``tokens_before`` are prompt tokens of waiting requests that are served before it. What the workers have begun is
    not counted: it may be almost done.
    """
    costs = view.costs
    lines = _lines(needs, view, Role.PREFILL, costs.prefill)
    if not lines:
        return 0.0
    # A cached prompt is not computed. How much of this one is cached is not known: as much as of any request lately.
    own_s = min([_least_s(line, 1, costs.least_uncached * needs.prompt_tokens, 0, 0) for line, _ in lines])
    queued_s = 0.0
    if tokens_before:
        each_s = [(number, _least_s(line, 0, 1, 0, 0)) for line, number in lines]
        if all(token_s > 0 for _, token_s in each_s):
            queued_s = costs.uncached * tokens_before / sum([number / token_s for number, token_s in each_s])
    if needs.min_output_tokens <= 1:
        return own_s + queued_s
    # The outputs that are sure, on a worker that does nothing else.
    output_s = min([_least_s(line, 1, 1) for line, _ in _lines(needs, view, Role.DECODE, costs.decode)], default=0.0)
    return own_s + queued_s + (needs.min_output_tokens - 1) * output_s


def _lines(needs: Needs, view: ClusterView, role: Role, known: Mapping[str, Line]) -> list[tuple[Line, int]]:
    """The lines of the workers that may do what ``role`` is for, each with their number; none if one is missing."""
    pair = needs.mode is Mode.PD
    numbers = Counter([w.kind for w in view.workers if w.ready and (not pair or w.role is role)])
    if not numbers.keys() <= known.keys():
        return []
    return [(known[kind], number) for kind, number in numbers.items()]


def _least_s(line: Line, *features: float) -> float:
    seconds, margin_s = line.at(*features)
    return max(0.0, CAUTION * (seconds - margin_s))
