"""Where requests wait until a worker is free: first come, first served, woken by the registry."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, LayoutMismatch, PdserveError
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.policies import LeastOutstandingTokens, create_policy
from router.registered_worker import RegisteredWorker
from router.registry import Share, WorkerRegistry

WaitMode = Literal[Mode.PD, Mode.COLOCATED, Mode.AUTO]
"""How a request is to run; ``auto``: apart where prefill and decode workers are ready, else on any ready worker."""

DRAIN_SAMPLES = 64
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. ``decode`` is None when one worker does both."""

    prefill: Share
    decode: Share | None

    def end(self) -> None:
        """Give the load back on both."""
        self.prefill.end()
        if self.decode is not None:
            self.decode.end()


@dataclass(slots=True, order=True)
class Waiting:
    """A request in the line. ``order`` is its place; a retry keeps the one it had. ``patient`` ones (retries) wait for
    a worker to come back until their deadline, the others for ``router.patience_s``. ``avoid`` are workers that failed
    them, ``prefer`` is the prefill worker of the attempt before: what it has computed, its cache still has."""

    order: int
    mode: WaitMode = field(compare=False)
    prompt_tokens: int = field(compare=False)
    output_tokens: int = field(compare=False)
    patient: bool = field(compare=False, default=False)
    avoid: frozenset[str] = field(compare=False, default=frozenset())
    prefer: str = field(compare=False, default="")
    since_s: float = field(compare=False, default=0.0)
    placed: asyncio.Future[Placement] = field(compare=False, default_factory=asyncio.Future)


class _Line:
    """The requests of one mode, oldest first. One that leaves before its turn stays in the heap until it comes to the
    front, or until such entries are the majority."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self.length = 0
        self.check_s = 0.0  # when the next may have run out of patience
        self.unavailable_since_s: float | None = None

    @property
    def head(self) -> Waiting | None:
        """The oldest that waits."""
        while self._heap and self._heap[0].placed.done():
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def push(self, waiting: Waiting) -> None:
        """Join the line."""
        heapq.heappush(self._heap, waiting)
        self.length += 1

    def left(self) -> None:
        """One that waited is placed, refused or cancelled; its future is done."""
        self.length -= 1
        if len(self._heap) > 2 * self.length + 16:
            self._heap = self.waiting()
            heapq.heapify(self._heap)

    def waiting(self) -> list[Waiting]:
        """Those that wait, in no order."""
        return [waiting for waiting in self._heap if not waiting.placed.done()]


class WaitingLine:
    """The router's queue. A request leaves it when a worker that prefills is free; then its load counts already."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, clock: Clock) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock
        self._prefill_policy = create_policy(config.policy)
        self._decode_policy = create_policy(config.policy)
        self._any_policy = LeastOutstandingTokens()
        self._lines: dict[WaitMode, _Line] = {Mode.PD: _Line(), Mode.COLOCATED: _Line(), Mode.AUTO: _Line()}
        self._placed_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)
        self._serving = False
        registry.subscribe(self._serve)

    @property
    def length(self) -> int:
        """Requests that wait."""
        return sum(line.length for line in self._lines.values())

    @property
    def is_full(self) -> bool:
        """Whether ``router.max_queue`` requests wait."""
        return self.length >= self._config.max_queue

    def refusal(self) -> CapacityExceeded:
        """What a request is told that finds the line full."""
        return CapacityExceeded(
            f"queue: {self._config.max_queue} requests wait already (router.max_queue); try again later",
            retry_after_s=self._retry_after_s(),
        )

    async def place(self, waiting: Waiting) -> Placement:
        """Wait for a free worker. Raises `CapacityExceeded` when no worker can hold the request or too many wait
        already, and, unless it is patient, `NotReady` or `LayoutMismatch` when no worker can be free as things are:
        at once if none ever could, else after ``router.patience_s``."""
        line, mode = self._lines[waiting.mode], waiting.mode
        error: PdserveError | None = self._registry.capacity_error(mode, waiting.prompt_tokens, waiting.output_tokens)
        if error is not None:
            raise error
        if not line.length and (placement := self._choose(waiting)) is not None:
            self._placed_s.append(self._clock.now())
            return placement
        if not waiting.patient:
            if self.is_full:
                raise self.refusal()
            error = self._registry.unavailable(mode)
            if error is not None and not self._may_come_back(mode, error):
                raise error
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
                # The place was given in the very moment the wait was cancelled: hand it back.
                waiting.placed.result().end()
            raise

    def _serve(self) -> None:
        """Place as many as possible, oldest first. Those who wait for the same workers never overtake each other."""
        if self._serving:  # placing changes the registry, which calls here again
            return
        self._serving = True
        try:
            lines = dict(self._lines)
            while heads := {mode: head for mode, line in lines.items() if (head := line.head) is not None}:
                mode, waiting = min(heads.items(), key=lambda entry: entry[1])
                placement = self._choose(waiting)
                if placement is not None:
                    self._placed_s.append(self._clock.now())
                    waiting.placed.set_result(placement)
                    lines[mode].left()
                    continue
                self._refuse(mode, lines.pop(mode))
        finally:
            self._serving = False

    # --- those that cannot be placed ---------------------------------------------------------------------------------

    def _refuse(self, mode: WaitMode, line: _Line) -> None:
        """Refuse those that have waited long enough for a worker to be ready, if that is what they wait for."""
        error = self._registry.unavailable(mode)
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

    def _may_come_back(self, mode: WaitMode, error: PdserveError) -> bool:
        """Whether waiting may help: workers that were ready may come back; a layout mismatch does not go away."""
        return self._registry.was_available(mode) and not isinstance(error, LayoutMismatch)

    def _retry_after_s(self) -> float:
        """Seconds until a quarter of the line has left, at the rate at which requests leave it now."""
        if not self._placed_s:
            return 1.0
        rate = len(self._placed_s) / max(self._clock.now() - self._placed_s[0], 1e-3)
        return min(max(self.length / 4 / rate, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    # --- the choice --------------------------------------------------------------------------------------------------

    def _choose(self, waiting: Waiting) -> Placement | None:
        if waiting.mode is Mode.COLOCATED:
            return self._choose_one(waiting)
        placement = self._choose_pair(waiting)
        if placement is None and waiting.mode is Mode.AUTO:
            sizes = waiting.prompt_tokens, waiting.output_tokens
            apart = self._registry.unavailable(Mode.PD) or self._registry.capacity_error(Mode.PD, *sizes)
            # Workers that differ in model or layout would answer differently.
            if apart is not None and not isinstance(apart, LayoutMismatch):
                return self._choose_one(waiting)
        return placement

    def _choose_one(self, waiting: Waiting) -> Placement | None:
        """A worker that does both."""
        tokens = waiting.prompt_tokens + waiting.output_tokens
        backlog = self._config.prefill_backlog_tokens
        free = [worker for worker in self._registry.ready() if worker.is_free(backlog) and worker.fits(tokens)]
        if not free:
            return None
        worker = self._any_policy.choose(_rather_not(free, waiting.avoid | self._registry.late()))
        placed = self._registry.begin(worker.worker_id, tokens, waiting.prompt_tokens, waiting.prompt_tokens)
        return Placement(placed, None)

    def _choose_pair(self, waiting: Waiting) -> Placement | None:
        """A prefill worker and a decode worker that are connected. The decode worker must have room for the prompt's KV
        now: prefill would hold it meanwhile."""
        prompt_tokens, tokens = waiting.prompt_tokens, waiting.prompt_tokens + waiting.output_tokens
        pairs: dict[RegisteredWorker, list[RegisteredWorker]] = {}
        for prefill in self._registry.ready(Role.PREFILL):
            if prefill.is_free(self._config.prefill_backlog_tokens) and prefill.fits(prompt_tokens + 1):
                peers = [p for p in self._registry.ready_peers(prefill) if p.fits(tokens) and p.has_room(prompt_tokens)]
                if peers:
                    pairs[prefill] = peers
        if not pairs:
            return None
        avoid = waiting.avoid | self._registry.late()
        # Skip prefill workers whose decode peers all failed this request.
        usable = [p for p, peers in pairs.items() if any(peer.worker_id not in avoid for peer in peers)]
        candidates = _rather_not(usable or list(pairs), avoid)
        again = next((worker for worker in candidates if worker.worker_id == waiting.prefer), None)
        prefill = again or self._prefill_policy.choose(candidates)
        decode = self._decode_policy.choose(_rather_not(pairs[prefill], avoid))
        return Placement(
            self._registry.begin(prefill.worker_id, prompt_tokens, prompt_tokens, prompt_tokens),
            self._registry.begin(decode.worker_id, waiting.output_tokens, kv_tokens=prompt_tokens),
        )


def _rather_not(workers: list[RegisteredWorker], avoid: frozenset[str]) -> list[RegisteredWorker]:
    return [worker for worker in workers if worker.worker_id not in avoid] or workers
