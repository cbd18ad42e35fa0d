"""Forecasts for the controller of roles: each is a simulated load on as many workers."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from contract.scaling import PROMPT_SIZES
from pdserve.core.config import PdserveConfig
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.forecast import Counts, Demand, Forecast
from simulator.planning.profile import Profiled
from simulator.planning.service import PlannedRequests, PlannedService, PlannedTurn, ServiceRun, run_service
from simulator.planning.step_time import Scaled

SECONDS = 20.0
LEAST_REQUESTS, MOST_REQUESTS, MOST_TOKENS = 80, 600, 20_000
"""Of a simulated load, which lasts `SECONDS` as far as these bounds allow. The first half fills the service, unless
outputs take longer than that, and the requests of the second half are judged."""
_FITS = 4
"""Simulations until steps are as long as measured: slower ones are larger, as more requests wait for them."""
_RIGHT = 0.05
"""Steps that differ by less are as long as measured."""
_MOST = 10.0
"""Steps are at most so many times as long, or as short, as those of the profile."""
_ALIKE = 0.1
"""Demands that differ by less have the same forecasts."""


class _Outcome(NamedTuple):
    """What came of a simulated load."""

    forecast: Forecast
    step_s: Mapping[Role, float]
    """Mean seconds of a step, of roles that computed any."""


class SimulatedForecaster:
    """Implements `router.forecast.Forecaster` for mode ``pd`` and objectives of ``config``: what `pdserve plan`
    simulates, with steps of ``profiled`` that `calibrate` makes as long as those of the service. Arrivals are Poisson,
    all outputs are as long as the average, and prompts are only as long as what is computed of them: tokens that were
    cached take neither blocks nor a link."""

    def __init__(self, profiled: Profiled, layout: KVLayout, config: PdserveConfig, max_model_len: int) -> None:
        self._profiled, self._config = profiled, config
        self._service = PlannedService(
            (),
            profiled.layout(layout),
            profiled.link,
            overheads=profiled.overheads,
            router=config.router.model_copy(update={"prefix_fetch": "off"}),
            layer_groups=config.transfer.layer_groups if config.transfer.overlap == "layer" else 0,
            max_model_len=max_model_len,
        )
        self._factors = dict.fromkeys(Role, 1.0)
        self._demand: Demand | None = None
        self._outcomes: dict[Counts, _Outcome] = {}

    def calibrate(self, counts: Counts, demand: Demand, step_s: Mapping[Role, float]) -> None:
        """See `Forecaster`."""
        for _ in range(_FITS):
            simulated_s = self._simulated(counts, demand).step_s
            ratios = {role: step_s[role] / seconds for role, seconds in simulated_s.items() if step_s.get(role)}
            factors = {
                role: min(max(1 / _MOST, self._factors[role] * ratio), _MOST)
                for role, ratio in ratios.items()
                if abs(ratio - 1) > _RIGHT
            }
            if not factors.items() - self._factors.items():
                return
            self._factors |= factors
            self._outcomes.clear()

    def forecast(self, counts: Counts, demand: Demand) -> Forecast:
        """See `Forecaster`."""
        return self._simulated(counts, demand).forecast

    def _simulated(self, counts: Counts, demand: Demand) -> _Outcome:
        """What comes of a load on these workers. It is kept while demands are alike."""
        if self._demand is None or not _is_alike(demand, self._demand):
            self._demand = demand
            self._outcomes.clear()
        if counts not in self._outcomes:
            engine, workers = self._config.engine, []
            for role, count in zip(Role, counts, strict=True):
                for number in range(count):
                    worker = self._profiled.worker(f"{role}-{number}", role, "host", engine)
                    workers.append(replace(worker, steps=Scaled(worker.steps, self._factors[role])))
            load = _requests(self._demand, self._service.max_model_len)
            run = run_service(replace(self._service, workers=workers), Mode.PD, load)
            self._outcomes[counts] = _Outcome(self._judged(run), _step_s(run))
        return self._outcomes[counts]

    def _judged(self, run: ServiceRun) -> Forecast:
        results = sorted(run.requests, key=lambda result: result.sent_s)
        judged, objectives = results[len(results) // 2 :], self._config.objectives
        assert objectives.ttft_ms is not None, "a controller has both"
        assert objectives.itl_ms is not None, "a controller has both"
        ttft_s, itl_s = objectives.ttft_ms / 1e3, objectives.itl_ms / 1e3
        gaps = [gap for result in judged for gap in result.itl_s[1:]]  # the first has the hand-off in it
        return Forecast(
            statistics.fmean(not result.error and result.ttft_s <= ttft_s for result in judged),
            statistics.fmean(gap <= itl_s for gap in gaps) if gaps else 1.0,
        )


def _step_s(run: ServiceRun) -> dict[Role, float]:
    found = {}
    for role in Role:
        mine = [use for use in run.workers if use.worker_id.startswith(role)]
        if steps := sum(use.steps for use in mine):
            found[role] = sum(use.busy for use in mine) * run.duration_s / steps
    return found


def _requests(demand: Demand, max_model_len: int) -> Iterator[PlannedRequests]:
    draw = random.Random("forecast")
    outputs = min(round(demand.output_tokens), max_model_len // 2)
    count = max(LEAST_REQUESTS, min(round(demand.rate * SECONDS), MOST_REQUESTS, MOST_TOKENS // outputs))
    sizes, at_s = draw.choices(range(len(demand.prompts)), demand.prompts, k=count), 0.0
    for size in sizes:
        at_s += draw.expovariate(demand.rate)
        yield PlannedRequests(at_s, (PlannedTurn((0,) * _tokens(size, max_model_len - outputs), outputs),))


def _tokens(size: int, most: int) -> int:
    """A prompt that was counted at this place of `PROMPT_SIZES`: the middle between the sizes around it."""
    bounds = (1, *PROMPT_SIZES, PROMPT_SIZES[-1])
    return max(1, min(round(math.sqrt(bounds[size] * bounds[size + 1])), most))


def _is_alike(a: Demand, b: Demand) -> bool:
    return all(
        abs(x - y) <= _ALIKE * max(x, y)
        for x, y in ((a.rate, b.rate), (a.output_tokens, b.output_tokens), (_mean_size(a), _mean_size(b)))
    )


def _mean_size(demand: Demand) -> float:
    """Of prompts, in tokens."""
    return sum(_tokens(size, PROMPT_SIZES[-1]) * count for size, count in enumerate(demand.prompts)) / sum(
        demand.prompts
    )
