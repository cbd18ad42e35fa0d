"""The real scheduler in virtual time: what a KV pool holds, and how long requests take, with and without paging.

`engine.core.EngineCore` runs with a clock that only steps move, and a runner that computes nothing: a step takes what a
cost model says, which is fitted to steps that were measured on the real engine (`experiments.engine_alone`). Requests
state a limit of their output, as clients do, and end earlier by a stop token, which no scheduler knows in advance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from engine.core import ComputedStep, EngineCore
from engine.messages import EngineEvent, KVEvent, KVRole, Step, Submit
from engine.scheduling.baselines import ContiguousReservation
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from experiments.engine_alone.program import StepCase
from experiments.workloads.arrivals import random_arrivals
from pdserve.core.clock import FakeClock
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

PoolKind = Literal["paged", "contiguous-request", "contiguous-context"]
POOL_KINDS: tuple[PoolKind, ...] = get_args(PoolKind)
"""Blocks as needed; a run for prompt and output limit; a run for the longest request that the engine takes."""

_STOP, _WORD = 1, 2
_TIMELINE_POINTS = 150


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds of a step: a constant, and so much per decoded token, per token of its context, per prompt token,
    and per pair of a prompt token and an earlier one. No coefficient is negative."""

    step: float
    decode_token: float
    decode_context: float
    prompt_token: float
    prompt_pair: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[StepCase, float]]) -> CostModel:
        """Least squares of the relative error over measured steps. Terms that would become negative are left out, one
        after the other."""
        features = np.array([_features(case) for case, _ in measured])
        times_ms = np.array([step_ms for _, step_ms in measured])
        used = list(range(features.shape[1]))
        while True:
            solved, *_ = np.linalg.lstsq(features[:, used] / times_ms[:, None], np.ones(len(times_ms)), rcond=None)
            if len(used) == 1 or solved.min() >= 0:
                break
            del used[int(solved.argmin())]
        values = dict(zip(used, solved, strict=True))
        return cls(*(max(0.0, float(values.get(index, 0.0))) for index in range(features.shape[1])))

    def errors(self, measured: Sequence[tuple[StepCase, float]]) -> list[float]:
        """The relative error of each measured step."""
        return [float(np.dot(list(asdict(self).values()), _features(case))) / step_ms - 1 for case, step_ms in measured]

    def step_ms(self, parts: Sequence[ScheduledSeq]) -> float:
        """How long the step takes."""
        total = self.step
        for part in parts:
            tokens = len(part.token_ids)
            if tokens == 1:
                total += self.decode_token + part.end * self.decode_context
            else:
                total += tokens * (self.prompt_token + (part.start + (tokens + 1) / 2) * self.prompt_pair)
        return total


def _features(case: StepCase) -> tuple[float, float, float, float, float]:
    if case.kind == "decode":
        return 1.0, case.rows, case.pairs, 0.0, 0.0
    return 1.0, 0.0, 0.0, case.rows, case.pairs


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Requests for a simulated engine: prompts of ``prompt_lens`` tokens (uniform), outputs with a mean of about
    ``output_mean`` tokens (exponential, at most the limit ``max_tokens``, which is all that the scheduler knows)."""

    requests: int
    prompt_lens: tuple[int, int]
    output_mean: float
    max_tokens: int

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """Prompt and output of each request."""
        draw = random.Random(f"pool/{seed}")
        return [
            (draw.randint(*self.prompt_lens), min(self.max_tokens, 2 + int(draw.expovariate(1 / self.output_mean))))
            for _ in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One simulated request: when it arrived, and its latencies."""

    index: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    e2e_ms: float
    longest_gap_ms: float


@dataclass(frozen=True, slots=True)
class PoolResult:
    """A simulation: its requests in order of arrival, and shares of the pool's tokens, averaged over time. ``live``:
    hold computed KV. ``reserved``: belong to a request. Of the free ones ``scattered`` are outside the longest run."""

    requests: tuple[PoolRequest, ...]
    duration_s: float
    steps: int
    preemptions: int
    running: float
    live: float
    reserved: float
    scattered: float
    timeline: tuple[tuple[float, float, float, int], ...]
    """Seconds, live share, reserved share, and running requests, at some of the steps."""

    def to_facts(self) -> dict[str, Any]:
        """Everything but the requests."""
        facts = asdict(self)
        del facts["requests"]
        return facts


def simulate(
    kind: PoolKind, config: SchedulerConfig, cost: CostModel, load: PoolLoad, rate: float | None, seed: int
) -> PoolResult:
    """Run ``load`` on one engine, at ``rate`` requests per second (Poisson; None: all at once), without a
    prefix cache."""
    return _Simulation(kind, replace(config, prefix_caching=False), cost, load, rate, seed).run()


@dataclass
class _Simulation:
    kind: PoolKind
    config: SchedulerConfig
    cost: CostModel
    load: PoolLoad
    rate: float | None
    seed: int
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.lengths = self.load.lengths(self.seed)
        arrivals = random_arrivals(self.rate, self.seed) if self.rate else iter(lambda: 0.0, None)
        self.arrivals_s = [at_s for _, at_s in zip(self.lengths, arrivals, strict=False)]
        self.scheduler = self._scheduler()
        self.core = EngineCore(self.scheduler, self, self.clock, self)
        self.made = [0] * len(self.lengths)
        self.first_s = [0.0] * len(self.lengths)
        self.last_s = [0.0] * len(self.lengths)
        self.gap_s = [0.0] * len(self.lengths)
        self.samples: list[tuple[float, float, float, float, float, int]] = []

    def _scheduler(self) -> Scheduler:
        if self.kind == "paged":
            return Scheduler(self.config, self.clock)
        return ContiguousReservation(self.config, self.clock, whole_context=self.kind == "contiguous-context")

    def run(self) -> PoolResult:
        """Until the last request is finished."""
        submitted = 0
        while True:
            while submitted < len(self.lengths) and self.arrivals_s[submitted] <= self.clock.now():
                self.core.take(self._submit(submitted))
                submitted += 1
            if not self.core.step():
                if submitted == len(self.lengths):
                    break
                self.clock.advance(max(0.0, self.arrivals_s[submitted] - self.clock.now()))
        return self._result()

    def _submit(self, index: int) -> Submit:
        prompt_tokens, _ = self.lengths[index]
        name = str(index)
        params = SamplingParams(max_tokens=self.load.max_tokens)
        return Submit(Request(name, (0,) * prompt_tokens, params, attempt_id=name), KVRole.LOCAL)

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        """Take the step's time; the last token of each output is the stop token."""
        took_s = self.cost.step_ms(seqs) / 1e3
        pool = self.config.num_blocks * self.config.block_size
        free = self.scheduler.blocks.free_blocks
        longest = self.scheduler.blocks.longest_run if isinstance(self.scheduler, ContiguousReservation) else free
        self.samples.append(
            (
                self.clock.now(),
                took_s,
                sum(seq.end for seq in seqs) / pool,
                1 - free / self.config.num_blocks,
                1 - longest / free if free else 0.0,
                len(seqs),
            )
        )
        self.clock.advance(took_s)
        return ComputedStep({seq.attempt_id: self._next(int(seq.attempt_id)) for seq in seqs if seq.sample})

    def _next(self, index: int) -> SampledToken:
        return SampledToken(_STOP if self.made[index] + 1 == self.lengths[index][1] else _WORD)

    def send(self, *events: EngineEvent) -> None:
        """Note tokens."""
        now_s = self.clock.now()
        for event in events:
            for token in event.tokens if isinstance(event, Step) else ():
                index = int(token.attempt_id)
                if self.made[index]:
                    self.gap_s[index] = max(self.gap_s[index], now_s - self.last_s[index])
                else:
                    self.first_s[index] = now_s
                self.last_s[index] = now_s
                self.made[index] += 1

    def send_kv(self, *events: KVEvent) -> None:
        """No KV leaves this engine."""

    def _result(self) -> PoolResult:
        requests = tuple(
            PoolRequest(
                index,
                at_s,
                self.lengths[index][0],
                self.made[index],
                (self.first_s[index] - at_s) * 1e3,
                (self.last_s[index] - at_s) * 1e3,
                self.gap_s[index] * 1e3,
            )
            for index, at_s in enumerate(self.arrivals_s)
        )
        samples = np.array(self.samples)
        live, reserved, scattered, running = np.average(samples[:, 2:], axis=0, weights=samples[:, 1])
        every = max(1, len(samples) // _TIMELINE_POINTS)
        return PoolResult(
            requests=requests,
            duration_s=self.clock.now(),
            steps=len(samples),
            preemptions=self.scheduler.load().preemptions,
            running=float(running),
            live=float(live),
            reserved=float(reserved),
            scattered=float(scattered),
            timeline=tuple((round(s[0], 4), round(s[2], 4), round(s[3], 4), int(s[5])) for s in self.samples[::every]),
        )
