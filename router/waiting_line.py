"""Where requests wait until a worker is free: first come, first served, woken by the registry, never by a clock."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field
from typing import Literal

from core.config import RouterConfig
from core.errors import CapacityExceeded, PdserveError
from core.request import Mode
from core.worker import Role
from router.policies import LeastOutstandingTokens, create_policy
from router.registered_worker import RegisteredWorker
from router.registry import Share, WorkerRegistry

RunMode = Literal[Mode.PD, Mode.COLOCATED]


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
    """A request in the line. ``order`` is its place; a retry keeps the one it had. ``patient`` ones may wait for a
    worker to come back, the others are refused when none can take them. ``avoid`` are workers that failed them,
    ``prefer`` is the prefill worker of the attempt before: what it has computed, its cache still has."""

    order: int
    mode: RunMode = field(compare=False)
    prompt_tokens: int = field(compare=False)
    output_tokens: int = field(compare=False)
    patient: bool = field(compare=False, default=False)
    avoid: frozenset[str] = field(compare=False, default=frozenset())
    prefer: str = field(compare=False, default="")
    placed: asyncio.Future[Placement] = field(compare=False, default_factory=asyncio.Future)


class WaitingLine:
    """The router's queue. A request leaves it when a worker that prefills is free; then its load counts already."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig) -> None:
        self._registry = registry
        self._config = config
        self._prefill_policy = create_policy(config.policy)
        self._decode_policy = create_policy(config.policy)
        self._any_policy = LeastOutstandingTokens()
        self._lines: dict[RunMode, list[Waiting]] = {Mode.PD: [], Mode.COLOCATED: []}
        self._serving = False
        registry.subscribe(self._serve)

    @property
    def length(self) -> int:
        """Requests that wait."""
        return sum(not waiting.placed.done() for line in self._lines.values() for waiting in line)

    async def place(self, waiting: Waiting) -> Placement:
        """Wait for a free worker. `NotReady` or `LayoutMismatch` when none can ever be free as things are (unless
        patient), `CapacityExceeded` when too many wait already."""
        heapq.heappush(self._lines[waiting.mode], waiting)
        self._serve()
        if not waiting.placed.done() and not waiting.patient and self.length > self._config.max_queue:
            waiting.placed.cancel()
            raise CapacityExceeded(
                f"queue: {self._config.max_queue} requests wait already (router.max_queue); try again later"
            )
        try:
            return await waiting.placed
        except asyncio.CancelledError:
            # The place may have been given in the very moment the wait was cancelled: hand it back.
            if waiting.placed.done() and not waiting.placed.cancelled() and waiting.placed.exception() is None:
                waiting.placed.result().end()
            raise

    def _serve(self) -> None:
        """Place as many as possible, oldest first. Those who wait for the same workers never overtake each other."""
        if self._serving:  # placing changes the registry, which calls here again
            return
        self._serving = True
        try:
            blocked: set[RunMode] = set()
            while True:
                heads = [line[0] for mode, line in self._lines.items() if mode not in blocked and self._tidy(line)]
                if not heads:
                    return
                waiting = min(heads)
                placement = self._choose(waiting)
                if placement is not None:
                    heapq.heappop(self._lines[waiting.mode])
                    waiting.placed.set_result(placement)
                    continue
                blocked.add(waiting.mode)
                if (error := self._registry.unavailable(waiting.mode)) is not None:
                    self._refuse(waiting.mode, error)
        finally:
            self._serving = False

    @staticmethod
    def _tidy(line: list[Waiting]) -> bool:
        while line and line[0].placed.done():
            heapq.heappop(line)
        return bool(line)

    def _refuse(self, mode: RunMode, error: PdserveError) -> None:
        for waiting in self._lines[mode]:
            if not waiting.patient and not waiting.placed.done():
                waiting.placed.set_exception(type(error)(*error.args))
        self._lines[mode] = [waiting for waiting in self._lines[mode] if not waiting.placed.done()]
        heapq.heapify(self._lines[mode])

    def _choose(self, waiting: Waiting) -> Placement | None:
        backlog = self._config.prefill_backlog_tokens
        tokens = waiting.prompt_tokens + waiting.output_tokens
        if waiting.mode is Mode.COLOCATED:
            free = [worker for worker in self._registry.ready() if worker.is_free(backlog)]
            if not free:
                return None
            worker = self._any_policy.choose(_rather_not(free, waiting.avoid))
            return Placement(self._registry.begin(worker.worker_id, tokens, waiting.prompt_tokens), None)
        pairs = {
            prefill: peers
            for prefill in self._registry.ready(Role.PREFILL)
            if prefill.is_free(backlog) and (peers := self._registry.ready_peers(prefill))
        }
        if not pairs:
            return None
        # A prefill worker all of whose peers failed this request is as little use as one that failed it itself.
        usable = [p for p, peers in pairs.items() if any(peer.worker_id not in waiting.avoid for peer in peers)]
        candidates = _rather_not(usable or list(pairs), waiting.avoid)
        again = next((worker for worker in candidates if worker.worker_id == waiting.prefer), None)
        prefill = again or self._prefill_policy.choose(candidates)
        decode = self._decode_policy.choose(_rather_not(pairs[prefill], waiting.avoid))
        return Placement(
            self._registry.begin(prefill.worker_id, waiting.prompt_tokens, waiting.prompt_tokens),
            self._registry.begin(decode.worker_id, tokens),
        )


def _rather_not(workers: list[RegisteredWorker], avoid: frozenset[str]) -> list[RegisteredWorker]:
    return [worker for worker in workers if worker.worker_id not in avoid] or workers
