"""The real scheduler in virtual time: what a KV pool holds, and how long requests take, with and without paging.

`engine.core.EngineCore` runs with a clock that only steps move, and a runner that computes nothing: a step takes what a
cost model says, which is fitted to steps that were measured on the real engine (`experiments.engine_alone`). Requests
state a limit of their output, as clients do, and end earlier by a stop token, which no scheduler knows in advance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from contract.engine import EngineEvent, KVEvent, KVRole, Step, Submit
from engine.core import ComputedStep, EngineCore
from engine.scheduling.baselines import ContiguousReservation
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from experiments.engine_alone.steps import StepCase
from experiments.fit import fitted
from experiments.run_folder import RequestRow
from experiments.workloads.arrivals import all_at_once, random_arrivals
from pdserve.core.clock import FakeClock
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

PoolKind = Literal["paged", "contiguous-request", "contiguous-context"]
POOL_KINDS: tuple[PoolKind, ...] = get_args(PoolKind)
"""Blocks as needed; a run for prompt and output limit; a run for the longest request that the engine takes."""
POOL, SIMULATED = "pool", "simulated"
ARRIVALS, AT_ONCE = "arrivals", "at-once"
"""Kinds of requests: open-loop, and all at the same time."""
_STOP, _WORD = 1, 2
_TIMELINE_POINTS = 150


class CostModel(NamedTuple):
    """Milliseconds of a step: a constant, and so much per decoded token, per token of its context, per prompt token,
    and per pair of a prompt token and an earlier one. No coefficient is negative."""

    step: float
    decode_token: float
    decode_context: float
    prompt_token: float
    prompt_pair: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[StepCase, float]]) -> CostModel:
        """The model with the least relative errors over measured steps. Terms that would become negative are left out,
        one after the other."""
        features, times_ms = np.array([_features(case) for case, _ in measured]), [step_ms for _, step_ms in measured]
        used = list(range(len(cls._fields)))
        while min(found := fitted(features[:, used].tolist(), times_ms)) < 0 and len(used) > 1:
            del used[found.index(min(found))]
        values = dict(zip(used, found, strict=True))
        return cls(*(max(0.0, values.get(term, 0.0)) for term in range(len(cls._fields))))

    def errors(self, measured: Sequence[tuple[StepCase, float]]) -> list[float]:
        """The relative error of each measured step."""
        return [float(np.dot(self, _features(case))) / step_ms - 1 for case, step_ms in measured]

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


def _features(case: StepCase) -> tuple[float, ...]:
    decodes = case.kind == "decode"
    return (1.0, case.rows, case.pairs, 0.0, 0.0) if decodes else (1.0, 0.0, 0.0, case.rows, case.pairs)


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


def simulate(
    kind: PoolKind, config: SchedulerConfig, cost: CostModel, load: PoolLoad, rate: float | None, seed: int
) -> tuple[list[RequestRow], dict[str, Any]]:
    """Run ``load`` on one engine, at ``rate`` requests per second (Poisson; None: all at once), without a prefix cache.
    Gives the requests in order of arrival, and facts: ``duration_s``, ``steps``, ``preemptions``; averaged over time
    the ``running`` requests and shares of the pool's tokens (``live`` ones hold computed KV, ``reserved`` ones belong
    to a request, and of the free ones ``scattered`` are outside the longest run); and the ``timeline``: seconds, live
    share, reserved share, and running requests, at some of the steps."""
    return _Simulation(kind, replace(config, prefix_caching=False), cost, load, rate, seed).run()


class _Simulation:
    """The engine's runner, and the port to which it sends tokens."""

    def __init__(
        self, kind: PoolKind, config: SchedulerConfig, cost: CostModel, load: PoolLoad, rate: float | None, seed: int
    ) -> None:
        self._config, self._cost, self._max_tokens = config, cost, load.max_tokens
        self._lengths = load.lengths(seed)
        arrivals = random_arrivals(rate, seed) if rate else all_at_once()
        self._arrivals_s = [at_s for _, at_s in zip(self._lengths, arrivals, strict=False)]
        self._place: dict[str, Any] = {
            "cell": POOL, "arm": kind, "repeat": seed, "kind": ARRIVALS if rate else AT_ONCE, "mode": SIMULATED
        }  # fmt: skip
        self._clock = FakeClock()
        self._scheduler = Scheduler(config, self._clock)
        if kind != "paged":
            whole = kind == "contiguous-context"
            self._scheduler = ContiguousReservation(config, self._clock, whole_context=whole)
        self._core = EngineCore(self._scheduler, self, self._clock, self)
        self._tokens_s: list[list[float]] = [[] for _ in self._lengths]
        self._samples: list[tuple[float, ...]] = []

    def run(self) -> tuple[list[RequestRow], dict[str, Any]]:
        """Until the last request is finished."""
        submitted = 0
        while True:
            while submitted < len(self._lengths) and self._arrivals_s[submitted] <= self._clock.now():
                name, (prompt_tokens, _) = str(submitted), self._lengths[submitted]
                params = SamplingParams(max_tokens=self._max_tokens)
                self._core.take(Submit(Request(name, (0,) * prompt_tokens, params, attempt_id=name), KVRole.LOCAL))
                submitted += 1
            if not self._core.step():
                if submitted == len(self._lengths):
                    return [self._row(index) for index in range(submitted)], self._facts()
                self._clock.advance(max(0.0, self._arrivals_s[submitted] - self._clock.now()))

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        """Take the step's time; the last token of each output is the stop token."""
        took_s = self._cost.step_ms(seqs) / 1e3
        config, blocks = self._config, self._scheduler.blocks
        free = blocks.free_blocks
        longest = self._scheduler.blocks.longest_run if isinstance(self._scheduler, ContiguousReservation) else free
        live = sum(seq.end for seq in seqs) / (config.num_blocks * config.block_size)
        scattered = 1 - longest / free if free else 0.0
        self._samples.append((self._clock.now(), took_s, live, 1 - free / config.num_blocks, scattered, len(seqs)))
        self._clock.advance(took_s)
        return ComputedStep({seq.attempt_id: [self._next(int(seq.attempt_id))] for seq in seqs if seq.sample})

    def _next(self, index: int) -> SampledToken:
        return SampledToken(_STOP if len(self._tokens_s[index]) + 1 == self._lengths[index][1] else _WORD)

    def send(self, *events: EngineEvent) -> None:
        """Note tokens."""
        for event in events:
            for token in event.tokens if isinstance(event, Step) else ():
                self._tokens_s[int(token.attempt_id)].append(self._clock.now())

    def send_kv(self, *events: KVEvent) -> None:
        """No KV leaves this engine."""

    def _row(self, index: int) -> RequestRow:
        at_s, tokens_s = self._arrivals_s[index], self._tokens_s[index]
        ttft_ms, e2e_ms = (tokens_s[0] - at_s) * 1e3, (tokens_s[-1] - at_s) * 1e3
        return RequestRow(
            **self._place,
            index=index,
            scheduled_s=at_s,
            sent_s=at_s,
            prompt_tokens=self._lengths[index][0],
            output_tokens=len(tokens_s),
            ttft_ms=ttft_ms,
            tpot_ms=(e2e_ms - ttft_ms) / max(1, len(tokens_s) - 1),
            e2e_ms=e2e_ms,
        )

    def _facts(self) -> dict[str, Any]:
        samples = np.array(self._samples)
        means = np.average(samples[:, 2:], axis=0, weights=samples[:, 1]).tolist()
        every = max(1, len(samples) // _TIMELINE_POINTS)
        return {
            "duration_s": self._clock.now(),
            "steps": len(samples),
            "preemptions": self._scheduler.load().preemptions,
            **dict(zip(("live", "reserved", "scattered", "running"), means, strict=True)),
            "timeline": [(round(s[0], 4), round(s[2], 4), round(s[3], 4), s[5]) for s in self._samples[::every]],
        }
