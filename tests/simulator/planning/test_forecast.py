"""Forecasts for the controller of roles: simulated loads on other numbers of workers."""

from __future__ import annotations

from typing import Any

import pytest

from contract.scaling import PROMPT_SIZES
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import Role
from router.forecast import Demand
from simulator.planning.forecast import SimulatedForecaster
from simulator.planning.profile import Profiled
from simulator.planning.service import LinkClass, ServiceRun, run_service
from tests.simulator.planning.test_service import LAYOUT, OVERHEADS, STEPS

P, D = Role.PREFILL, Role.DECODE
PROFILE = Profiled("", "tiny", "bfloat16", "cpu", 256, 16, 16_000, STEPS, 0.0, OVERHEADS, LinkClass(1e9, 1e-4), ())
"""A step of 256 tokens takes 20 ms, and a prompt of 1,024 tokens four of them."""


def forecaster(**objectives: float) -> SimulatedForecaster:
    scaling = {"controller": "roles", "ttft_ms": 400, "itl_ms": 20, **objectives}
    return SimulatedForecaster(PROFILE, LAYOUT, PdserveConfig.parse({"scaling": scaling}), 4096)


def demand(rate: float, outputs: float = 20.0, size: int = 1024) -> Demand:
    counts = [0] * (len(PROMPT_SIZES) + 1)
    counts[PROMPT_SIZES.index(size)] = 100
    return Demand(rate, tuple(counts), outputs)


def test_prompts_that_one_worker_cannot_compute_need_another() -> None:
    model = forecaster()
    few, many = demand(4.0), demand(18.0)
    assert model.forecast((1, 3), few).ttft > 0.95
    assert model.forecast((1, 3), many).ttft < 0.4
    assert model.forecast((2, 2), many).ttft > 0.9


def test_outputs_that_one_worker_decodes_too_slowly_need_another() -> None:
    model = forecaster(itl_ms=14)
    load = demand(6.0, 200.0, 64)
    assert model.forecast((2, 1), load).itl < 0.85
    assert model.forecast((1, 2), load).itl > 0.95


def test_one_token_has_no_gaps() -> None:
    assert forecaster(itl_ms=1e-3).forecast((1, 1), demand(1.0, 1.0)).itl == 1.0


def test_steps_become_as_long_as_those_of_the_service() -> None:
    model, load = forecaster(), demand(8.0)
    assert model.forecast((1, 1), load).ttft > 0.9
    model.calibrate((1, 1), load, {P: 0.035, D: 0.0115})
    assert model.forecast((1, 1), load).ttft < 0.5
    assert model.forecast((2, 1), load).ttft > 0.9
    steps_s = model._simulated((1, 1), load).step_s
    assert steps_s == {P: pytest.approx(0.035, rel=0.06), D: pytest.approx(0.0115, rel=0.06)}


def test_steps_of_an_engine_that_tells_none_or_nonsense_are_bounded() -> None:
    model, load = forecaster(), demand(8.0)
    before = model.forecast((1, 1), load)
    model.calibrate((1, 1), load, {P: 0.0})
    assert model.forecast((1, 1), load) == before
    model.calibrate((1, 1), load, {P: 1e6, D: 1e-9})
    assert model._factors == {P: 10.0, D: 0.1}


def test_a_load_is_simulated_once_while_it_stays_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def noting(*args: Any) -> ServiceRun:
        runs.append(args)
        return run_service(*args)

    monkeypatch.setattr("simulator.planning.forecast.run_service", noting)
    model = forecaster()
    for rate in (4.0, 4.1, 3.9):
        model.calibrate((1, 1), demand(rate), {})
        model.forecast((1, 1), demand(rate))
    assert len(runs) == 1
    for load in (demand(5.0), demand(5.0, 30.0), demand(5.0, 30.0, 2048)):
        model.forecast((1, 1), load)
    assert len(runs) == 4


def test_prompts_and_outputs_longer_than_the_context_are_cut() -> None:
    huge = demand(0.02, 1e6, PROMPT_SIZES[-1])
    assert forecaster(ttft_ms=100_000).forecast((1, 1), huge).ttft > 0.9, "they are served"
