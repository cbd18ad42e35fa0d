"""What a gateway knows of the load: how its requests meet their objectives, and how much each role has to do."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from pdserve.core.clock import Clock
from pdserve.core.config import SloConfig
from pdserve.core.errors import PdserveError
from pdserve.core.timeline import EventKind
from pdserve.core.worker import Role
from router.request_record import RequestRecord
from router.view import WorkerView

if TYPE_CHECKING:
    from gateway.inference import Arrival, Completion  # the supervisor imports this module alone

SHARES = (0.25, 1 / 3, 0.4, 0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 1.0)
"""Shares of an objective up to which durations are counted apart."""


class RoleSamples(msgspec.Struct):
    """Sums over all looks at the workers of a role. ``load``: the mean share of their capacity in use. ``running``: the
    mean number of requests in a batch. ``short``: 1 if the next request waited for a worker of this role. ``ready``:
    the number of workers that were ready."""

    load: float = 0.0
    running: float = 0.0
    short: int = 0
    ready: int = 0


class GatewayLoad(msgspec.Struct):
    """Counts since the gateway's start, and its state now.

    ``ttft``, ``itl``: first tokens, and gaps between tokens after token 2: for each of `SHARES` those that took longer
    than the share before and at most this one of the objective, then those beyond it. Empty without an objective.
    ``first_tokens``, ``prompt_tokens``: first tokens, and the tokens of their prompts. ``gaps``: further tokens.
    ``looks``: looks at the workers; ``samples`` is what they saw, by role.
    Now: requests that are ``waiting`` for their first token, ``overdue`` ones of them, which have missed its objective
    already, and those that are ``decoding``.

    Times are between events at the gateway that the client has no part in: a first token counts from when the prompt
    had been read, and a gap until the token reached the gateway.
    """

    ttft: list[int] = []
    itl: list[int] = []
    first_tokens: int = 0
    prompt_tokens: int = 0
    gaps: int = 0
    looks: int = 0
    samples: dict[Role, RoleSamples] = {}
    waiting: int = 0
    overdue: int = 0
    decoding: int = 0


class LoadMeter:
    """Observes requests (`gateway.inference.Observer`), and the workers at each `look`. ``running`` gives the requests
    that have not ended."""

    def __init__(self, objectives: SloConfig, clock: Clock, running: Callable[[], Iterable[RequestRecord]]) -> None:
        self._clock = clock
        self._running = running
        self._ttft = _bounds_s(objectives.ttft_ms)
        self._itl = _bounds_s(objectives.itl_ms)
        self._load = GatewayLoad(
            ttft=[0] * (len(self._ttft) + 1) if self._ttft else [],
            itl=[0] * (len(self._itl) + 1) if self._itl else [],
            samples={role: RoleSamples() for role in Role},
        )

    def first(self, record: RequestRecord, seconds: float) -> None:
        """Count the first token of a request."""
        self._load.first_tokens += 1
        self._load.prompt_tokens += len(record.request.prompt_token_ids)
        if self._ttft:
            time = record.timeline.gateway_time
            seconds = time(EventKind.TOKEN_1_ARRIVED) - time(EventKind.TOKENIZED)
            self._load.ttft[bisect_left(self._ttft, seconds)] += 1

    def gap(self, seconds: float, index: int) -> None:
        """Count a further token. The gap before token 2 has the hand-off in it, which more workers do not shorten."""
        self._load.gaps += 1
        if self._itl and index > 1:
            self._load.itl[bisect_left(self._itl, seconds)] += 1

    def failed(self, error: PdserveError, arrival: Arrival | None) -> None:
        """Not counted."""

    def cancelled(self) -> None:
        """Not counted."""

    def finished(self, completion: Completion, arrival: Arrival) -> None:
        """Not counted."""

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

    def load(self) -> GatewayLoad:
        """The load now."""
        now_s, load = self._clock.now(), self._load
        waits_s, load.decoding = [], 0
        for record in self._running():
            if record.output_token_ids:
                load.decoding += 1
            elif record.timeline.has(EventKind.TOKENIZED):
                waits_s.append(now_s - record.timeline.gateway_time(EventKind.TOKENIZED))
        load.waiting = len(waits_s)
        load.overdue = sum([wait_s > self._ttft[-1] for wait_s in waits_s]) if self._ttft else 0
        return copy.deepcopy(load)


def within_objective(counts: Sequence[int]) -> tuple[int, int]:
    """Of `GatewayLoad.ttft` or `itl`: how many met the objective, and how many missed it."""
    return sum(counts[: len(SHARES)]), sum(counts[len(SHARES) :])


def _bounds_s(objective_ms: float | None) -> list[float]:
    return [] if objective_ms is None else [objective_ms / 1e3 * share for share in SHARES]


def _in_use(worker: WorkerView) -> float:
    """The share of a worker's capacity in use: of a prefill worker its time, of a decode worker its blocks or its
    places in a step."""
    if worker.role is Role.PREFILL:
        return float(worker.prompt_tokens > 0)
    places = worker.running / worker.max_num_seqs if worker.max_num_seqs else 0.0
    return max(1 - worker.room / worker.num_blocks, places)
