"""Measures the load: how requests meet their objectives, and how much each role has to do."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from contract.scaling import PROMPT_SIZES, SHARES, GatewayLoad, RoleSamples, WorkerSteps
from gateway.inference import Observer
from pdserve.core.clock import Clock
from pdserve.core.config import SloConfig
from pdserve.core.timeline import EventKind
from pdserve.core.worker import Role
from router.registered_worker import RegisteredWorker
from router.session import Session
from router.view import WorkerView

LOOK_EVERY_S = 0.1
"""How often the load of the workers is sampled for a controller."""


class LoadMeter(Observer):
    """Observes requests, and the workers at each `look`. ``running`` gives the requests
    that have not ended."""

    def __init__(self, objectives: SloConfig, clock: Clock, running: Callable[[], Iterable[Session]]) -> None:
        self._clock = clock
        self._running = running
        self._ttft = _bounds_s(objectives.ttft_ms)
        self._itl = _bounds_s(objectives.itl_ms)
        self._load = GatewayLoad(
            ttft=[0] * (len(self._ttft) + 1) if self._ttft else [],
            itl=[0] * (len(self._itl) + 1) if self._itl else [],
            prompts=[0] * (len(PROMPT_SIZES) + 1),
            samples={role: RoleSamples() for role in Role},
        )

    def first(self, record: Session, seconds: float) -> None:
        """Count the first token of a request."""
        self._load.first_tokens += 1
        tokens = len(record.request.prompt_token_ids)
        self._load.prompt_tokens += tokens
        self._load.prompts[bisect_left(PROMPT_SIZES, tokens - record.result.prefill_cached_tokens)] += 1
        if self._ttft:
            time = record.timeline.gateway_time
            seconds = time(EventKind.TOKEN_1_ARRIVED) - time(EventKind.TOKENIZED)
            self._load.ttft[bisect_left(self._ttft, seconds)] += 1

    def gap(self, seconds: float, index: int) -> None:
        """Count a further token. The gap before token 2 has the hand-off in it, which more workers do not shorten."""
        self._load.gaps += 1
        if self._itl and index > 1:
            self._load.itl[bisect_left(self._itl, seconds)] += 1

    def look(self, workers: Sequence[WorkerView], short_of: Role | None) -> None:
        """Note what the ready workers have to do now, and which role's workers the next request waits for."""
        self._load.looks += 1
        for role, samples in self._load.samples.items():
            ready = [worker for worker in workers if worker.ready and worker.role is role]
            samples.ready += len(ready)
            samples.short += short_of is role
            if ready:
                samples.load += fmean([_in_use(worker) for worker in ready])
                samples.running += fmean([worker.running for worker in ready])

    def load(self, workers: Iterable[RegisteredWorker] = ()) -> GatewayLoad:
        """The load now, with the steps of ``workers``."""
        now_s, load = self._clock.now(), self._load
        load.steps = {
            each.info.worker_id: WorkerSteps(each.info.role, each.info.epoch, each.load.steps, each.load.busy_s)
            for each in workers
        }
        waits_s, load.decoding = [], 0
        for record in self._running():
            if record.output_token_ids:
                load.decoding += 1
            elif record.timeline.has(EventKind.TOKENIZED):
                waits_s.append(now_s - record.timeline.gateway_time(EventKind.TOKENIZED))
        load.waiting = len(waits_s)
        load.overdue = sum([wait_s > self._ttft[-1] for wait_s in waits_s]) if self._ttft else 0
        return copy.deepcopy(load)


def _bounds_s(objective_ms: float | None) -> list[float]:
    return [] if objective_ms is None else [objective_ms / 1e3 * share for share in SHARES]


def _in_use(worker: WorkerView) -> float:
    """The share of a worker's capacity in use: of a prefill worker its time, of a decode worker its blocks or its
    places in a step."""
    if worker.role is Role.PREFILL:
        return float(worker.prompt_tokens > 0)
    places = worker.running / worker.max_num_seqs if worker.max_num_seqs else 0.0
    return max(1 - worker.room / worker.num_blocks, places)
