"""The controller of roles and workers: on made-up figures, and on a model of a service under constant and changing
loads."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.scaling import SHARES
from pdserve.core.config import ScalingConfig
from pdserve.core.worker import Role
from router.forecast import Counts, Demand, Forecast, Forecaster
from router.scaling_controller import Action, Observation, RoleLoad, ScalingController

P, D = Role.PREFILL, Role.DECODE
TTFT_S, ITL_S = 0.5, 0.05
GOOD = (100, *[0] * len(SHARES))
MISSED = (*[0] * len(SHARES), 100)
TIGHT = (*[0] * (len(SHARES) - 1), 100, 0)


def config(**changes: Any) -> ScalingConfig:
    objectives = {"ttft_ms": TTFT_S * 1e3, "itl_ms": ITL_S * 1e3}
    return ScalingConfig(**{"controller": "roles", "interval_s": 1, "hold_s": 5, **objectives, **changes})


class Figures:
    """Gives a controller the same figures second by second."""

    def __init__(self, forecaster: Forecaster | None = None, **changes: Any) -> None:
        self.controller = ScalingController(config(**changes), forecaster)
        self.now_s = 100.0

    def look(self, seconds: int = 1, workers: tuple[int, int] = (1, 2), **changes: Any) -> list[Action]:
        """What it does meanwhile. ``prefill`` and ``decode`` are values of `RoleLoad`."""
        actions = []
        for _ in range(seconds):
            loads = {
                role.value: RoleLoad(count, **{"load": 0.2, **changes.get(role.value, {})})
                for role, count in zip(Role, workers, strict=True)
            }
            seen = Observation(
                self.now_s,
                self.now_s + 1,
                **{
                    "ttft": GOOD,
                    "itl": GOOD,
                    "requests": 100,
                    "first_tokens": 100,
                    "prompt_tokens": 10_000,
                    "output_tokens": 1000,
                    "in_flight": 10.0,
                    **changes,
                    **loads,
                },
            )
            self.now_s += 1
            if (action := self.controller.observe(seen)) is not None:
                actions.append(action)
        return actions


SATURATED: dict[str, Any] = {"ttft": MISSED, "prefill": {"load": 1.0, "short": 0.8}}
LATE_TOKENS: dict[str, Any] = {"itl": MISSED, "decode": {"load": 0.3, "running": 9.0}}


def test_a_worker_moves_to_the_role_that_misses_its_objective_once_it_has_for_long_enough() -> None:
    figures = Figures()
    assert figures.look(20) == []
    assert figures.look(3, **SATURATED) == []
    assert figures.look(5) == [], "a peak that has passed"
    (action,) = figures.look(8, **SATURATED)
    assert (action.kind, action.role) == ("flip", P)
    assert action.reason.startswith("0% of first tokens met the objective of TTFT, and prefill workers are busy")
    assert "decode workers have 20% of their capacity in use" in action.reason


@pytest.mark.parametrize(
    ("why_not", "changes"),
    [
        ("the prompts themselves take too long", {**SATURATED, "prefill": {"load": 0.3}}),
        ("decode has nothing to spare", {**SATURATED, "decode": {"load": 0.5}}),
        ("one decode worker fewer would miss ITL", {**SATURATED, "itl": TIGHT}),
        ("both are short", {**SATURATED, **LATE_TOKENS}),
        ("the last decode worker stays", {**SATURATED, "workers": (2, 1)}),
        ("there are too few requests to tell", {**SATURATED, "ttft": (0,) * len(SHARES) + (1,), "overdue": 0}),
        ("one request alone is too slow", {**LATE_TOKENS, "workers": (2, 1), "decode": {"running": 0.9}}),
        ("prefill has nothing to spare", {**LATE_TOKENS, "workers": (2, 1), "prefill": {"load": 0.4}}),
    ],
)
def test_what_would_not_help_is_left_alone(why_not: str, changes: dict[str, Any]) -> None:
    assert Figures().look(60, **changes) == [], why_not


def test_requests_that_still_wait_count_as_late() -> None:
    (action,) = Figures().look(8, **{**SATURATED, "ttft": GOOD, "overdue": 1000})
    assert (action.kind, action.role) == ("flip", P)


def test_decode_gets_a_worker_for_its_tokens_and_for_its_room() -> None:
    (action,) = Figures().look(6, workers=(2, 1), **LATE_TOKENS)
    assert (action.kind, action.role) == ("flip", D)
    room = {"ttft": MISSED, "decode": {"load": 1.0, "short": 0.9}}
    (action,) = Figures().look(6, workers=(2, 1), **room)
    assert (action.kind, action.role) == ("flip", D)
    assert "requests wait for room on decode workers" in action.reason


def test_bounds_hold() -> None:
    assert Figures(min_decode=2).look(30, **SATURATED) == []
    assert Figures(max_prefill=1).look(30, **SATURATED) == []
    full: dict[str, Any] = {"controller": "workers", "max_workers": 3, "min_decode": 2}
    assert Figures(**full).look(30, **SATURATED) == []


def test_after_an_action_new_figures_are_collected() -> None:
    figures = Figures()
    assert len(figures.look(6, **SATURATED)) == 1
    acted_s = figures.now_s
    (back,) = figures.look(40, workers=(2, 1), **LATE_TOKENS)
    assert back.role is D
    assert figures.now_s - acted_s == 40
    figures = Figures()
    while not figures.look(1, **SATURATED):
        pass
    assert figures.look(9, workers=(2, 1), **LATE_TOKENS) == [], "hold_s to settle, hold_s to look"


def test_what_did_not_help_is_not_done_again_under_the_same_load_but_under_another_one() -> None:
    figures = Figures()
    for _ in range(3):
        figures.look(15, **SATURATED)
        figures.look(15, workers=(2, 1), **LATE_TOKENS)
    assert figures.look(200, **SATURATED) == []
    other = {**SATURATED, "prompt_tokens": 30_000}
    assert figures.look(15, **other)[0].role is P


def test_loads_that_alternate_move_workers_each_time() -> None:
    figures = Figures()
    heavy, light = {**SATURATED, "prompt_tokens": 50_000}, {**LATE_TOKENS, "output_tokens": 20_000}
    for _ in range(3):
        assert [action.role for action in figures.look(20, **heavy)] == [P]
        assert figures.look(20, workers=(2, 1), prompt_tokens=50_000) == []
        assert [action.role for action in figures.look(20, workers=(2, 1), **light)] == [D]


def test_workers_are_added_where_none_can_be_spared_and_removed_after_a_long_calm() -> None:
    figures = Figures(controller="workers", max_workers=4)
    busy = {**SATURATED, "decode": {"load": 0.6}}
    (action,) = figures.look(10, **busy)
    assert (action.kind, action.role) == ("add", P)
    assert "no decode worker can be spared" in action.reason
    waiting = {**busy, "prefill": {"load": 1.0, "short": 0.8, "coming": 1}}
    assert figures.look(60, **waiting) == [], "one is on its way"
    calm = {"prefill": {"load": 0.1}, "decode": {"load": 0.15}}
    assert figures.look(18, workers=(2, 2), **calm) == []
    (action,) = figures.look(10, workers=(2, 2), **calm)
    assert (action.kind, action.role) == ("remove", P)
    assert figures.look(200, workers=(1, 1), **calm) == [], "min_workers"
    assert Figures().look(200, workers=(2, 2), **calm) == [], "controller roles removes nothing"


def test_a_change_by_hand_begins_the_look_anew() -> None:
    figures = Figures()
    figures.look(4, **SATURATED)
    assert figures.look(4, workers=(1, 3), **SATURATED) == []
    assert len(figures.look(2, workers=(1, 3), **SATURATED)) == 1


# --- forecasts -------------------------------------------------------------------------------------------------------


class Forecasts:
    """Says what ``of`` does, and notes what it was asked."""

    def __init__(self, of: Callable[[Counts], tuple[float, float]]) -> None:
        self._of = of
        self.asked: list[Counts] = []
        self.step_s: list[Mapping[Role, float]] = []
        self.demands: list[Demand] = []

    def calibrate(self, counts: Counts, demand: Demand, step_s: Mapping[Role, float]) -> None:
        self.step_s.append(step_s)

    def forecast(self, counts: Counts, demand: Demand) -> Forecast:
        self.asked.append(counts)
        self.demands.append(demand)
        return Forecast(*self._of(counts))


def test_as_many_workers_move_at_once_as_the_forecast_says_that_it_takes() -> None:
    model = Forecasts(lambda counts: (min(1.0, counts[0] / 4), 1.0))
    figures = Figures(model)
    figures.look(10, workers=(1, 7))
    (action,) = figures.look(3, workers=(1, 7), **SATURATED)
    assert (action.kind, action.role, action.number) == ("flip", P, 3)
    assert action.after((1, 7)) == (4, 4)
    assert action.reason.endswith("expected of 1P7D is TTFT 25%, ITL 100%, of 4P4D TTFT 100%, ITL 100%")
    assert model.asked == [(1, 7), (2, 6), (3, 5), (4, 4)], "it stops at what is enough"


def test_with_a_forecast_a_worker_moves_as_soon_as_its_role_is_short() -> None:
    figures = Figures(Forecasts(lambda counts: (0.5 * counts[0], 1.0)))
    figures.look(10)
    (action,) = figures.look(2, **SATURATED)
    assert action.after((1, 2)) == (2, 1)


def test_a_forecast_of_no_gain_keeps_a_worker_where_it_is() -> None:
    figures = Figures(Forecasts(lambda counts: (0.5, 0.9) if counts == (1, 2) else (0.9, 0.52)))
    assert figures.look(60, **SATURATED) == []
    assert figures.controller.verdict.endswith("expected of 1P2D is TTFT 50%, ITL 90%, of 2P1D TTFT 90%, ITL 52%")


def test_the_best_of_splits_that_are_not_enough_is_chosen() -> None:
    shares = {1: 0.1, 2: 0.3, 3: 0.6, 4: 0.4, 5: 0.2, 6: 0.2, 7: 0.1}
    figures = Figures(Forecasts(lambda counts: (shares[counts[0]], 1.0)))
    (action,) = figures.look(8, workers=(1, 7), **SATURATED)
    assert action.after((1, 7)) == (3, 5)


def test_a_forecast_that_does_not_see_what_is_measured_is_not_used() -> None:
    figures = Figures(Forecasts(lambda counts: (1.0, 1.0)))
    figures.look(10)
    assert figures.look(3, **SATURATED) == [], "without a forecast it takes longer"
    (action,) = figures.look(4, **SATURATED)
    assert (action.number, action.expected) == (1, None)


def test_bounds_hold_with_a_forecast() -> None:
    best = Forecasts(lambda counts: (counts[0] / 20, 1.0))
    for bound, after in (({"min_decode": 5}, (3, 5)), ({"max_prefill": 2}, (2, 6))):
        (action,) = Figures(best, **bound).look(8, workers=(1, 7), **SATURATED)
        assert action.after((1, 7)) == after
    figures = Figures(best, min_decode=7)
    assert figures.look(60, workers=(1, 7), **SATURATED) == []
    assert figures.controller.verdict.endswith("the bounds allow no other numbers of workers")


def test_a_worker_is_added_where_no_split_is_enough_and_not_removed_if_it_is_needed() -> None:
    model = Forecasts(lambda counts: (min(1.0, 0.4 * counts[0]), 0.3 * counts[1]))
    scales: dict[str, Any] = {"controller": "workers", "max_workers": 6}
    (action,) = Figures(model, **scales).look(8, workers=(2, 3), **SATURATED)
    assert (action.kind, action.after((2, 3))) == ("add", (3, 3))
    assert Figures(model, **{**scales, "max_workers": 5}).look(60, workers=(2, 3), **SATURATED) == []
    calm = {"prefill": {"load": 0.1}, "decode": {"load": 0.15}}
    figures = Figures(model, **scales)
    assert figures.look(60, workers=(3, 3), **calm) == []
    assert figures.controller.verdict == "TTFT 80%, ITL 90% is expected of 2P3D"
    (removed,) = Figures(Forecasts(lambda counts: (1.0, 1.0)), **scales).look(30, workers=(3, 3), **calm)
    assert (removed.kind, removed.expected) == ("remove", Forecast(1.0, 1.0))


def test_what_was_expected_is_compared_once_with_what_was_measured() -> None:
    figures = Figures(Forecasts(lambda counts: (0.5 * counts[0], 1.0)))
    figures.look(5, **SATURATED)
    outcomes = []
    late = (80, *[0] * (len(SHARES) - 1), 20)
    for _ in range(30):
        figures.look(1, workers=(2, 1), ttft=late, prefill={"load": 0.3})
        outcomes.append(figures.controller.outcome)
    assert [each for each in outcomes if each] == ["measured since then: TTFT 80%, ITL 100%"]
    assert outcomes.index("measured since then: TTFT 80%, ITL 100%") == 9, "hold_s to settle, hold_s to measure"


def test_while_a_queue_drains_no_further_worker_moves() -> None:
    figures = Figures(Forecasts(lambda counts: (0.5 * counts[0], 1.0)))
    figures.look(5, workers=(1, 7), **SATURATED)
    assert figures.look(18, workers=(2, 6), **SATURATED) == []
    assert figures.controller.verdict.endswith("TTFT 100%, ITL 100% is expected of these workers in a while")
    outcomes = [(figures.look(1, workers=(2, 6)), figures.controller.outcome) for _ in range(5)]
    assert [outcome for _, outcome in outcomes if outcome] == ["measured since then: TTFT 80%, ITL 100%"]


def test_after_a_wrong_forecast_there_is_none_under_the_same_load() -> None:
    model = Forecasts(lambda counts: (0.4 * counts[0], 1.0))
    figures = Figures(model)
    figures.look(5, **SATURATED)
    outcomes = []
    for _ in range(30):
        figures.look(1, workers=(2, 1), **SATURATED)
        outcomes.append(figures.controller.outcome)
    (outcome,) = [each for each in outcomes if each]
    assert outcome == "measured since then: TTFT 0%, ITL 100%, so there are no more forecasts under this load"
    assert outcomes.index(outcome) == 24, "hold_s to settle, and four times as long for a queue to drain"
    asked = len(model.asked)
    figures.look(10, workers=(2, 1), **SATURATED)
    assert len(model.asked) == asked
    figures.look(20, workers=(2, 1), **{**SATURATED, "prompt_tokens": 50_000})
    assert len(model.asked) > asked


def test_a_forecast_gets_what_was_asked_and_how_long_steps_took() -> None:
    model = Forecasts(lambda counts: (0.5 * counts[0], 1.0))
    seen = {"prompts": (0, 100, 0), "prefill": {"load": 1.0, "short": 0.8, "steps": 10, "busy_s": 0.5}}
    Figures(model).look(6, **{**SATURATED, **seen})
    assert model.demands[0] == Demand(100.0, (0, 400, 0), 10.0), "of the last two thirds"
    assert model.step_s == [{P: pytest.approx(0.05)}], "a role without steps has none"


def test_while_what_is_asked_changes_there_is_no_forecast() -> None:
    model = Forecasts(lambda counts: (0.5 * counts[0], 1.0))
    figures = Figures(model)
    figures.look(10, output_tokens=10_000)
    actions = [figures.look(1, output_tokens=100, **SATURATED) for _ in range(4)]
    assert [len(each) for each in actions] == [0, 0, 0, 1], "two thirds of hold_s are alike"
    assert model.demands[0].output_tokens == 1.0


def test_after_a_forecast_of_no_gain_there_is_none_for_a_while() -> None:
    model = Forecasts(lambda counts: (0.5, 1.0))
    figures = Figures(model)
    figures.look(5, **SATURATED)
    assert len(model.asked) == 2
    refusal = figures.controller.verdict
    assert figures.look(4, **SATURATED) == []
    assert (len(model.asked), figures.controller.verdict) == (2, refusal)
    figures.look(1, **SATURATED)
    assert len(model.asked) == 4


def test_one_look_in_a_long_time_is_not_enough_for_a_forecast() -> None:
    model = Forecasts(lambda counts: (0.5 * counts[0], 1.0))
    busy, calm = RoleLoad(1, 0, 1.0, 0.0, 0.8), RoleLoad(2, 0, 0.2)
    seen = Observation(100.0, 110.0, busy, calm, MISSED, GOOD, 0, 100, 100, 10_000, (100,), 1000, 10.0)
    action = ScalingController(config(), model).observe(seen)
    assert action is not None
    assert (action.expected, model.asked) == (None, [])


def test_an_action_that_was_taken_before_stays_the_verdict() -> None:
    figures = Figures(Forecasts(lambda counts: (0.5 * counts[0], 1.0)))
    figures.look(5, **SATURATED)
    figures.look(20, workers=(2, 1))
    assert figures.look(20, **SATURATED) == []
    assert figures.controller.verdict.endswith("the action was taken before with these workers under this load")


def test_a_worker_that_was_removed_may_be_added_again_and_then_stays() -> None:
    figures = Figures(controller="workers", max_workers=4)
    busy: dict[str, Any] = {**SATURATED, "decode": {"load": 0.6}}
    calm: dict[str, Any] = {"decode": {"load": 0.6}, "prefill": {"load": 0.1}}
    done = []
    for workers, changes in [((1, 2), busy), ((2, 2), calm), ((1, 2), busy), ((2, 2), calm)]:
        actions = figures.look(60, workers=workers, **changes)
        done += [(action.kind, action.role) for action in actions[:1]]
    assert done == [("add", P), ("remove", P), ("add", P)]


def test_a_queue_that_drains_asks_for_nothing() -> None:
    model = Forecasts(lambda counts: (0.0, 0.0))
    (action,) = Figures(model).look(8, **{**SATURATED, "requests": 0})
    assert (action.role, action.expected, model.asked) == (P, None, [])


def test_without_a_first_token_there_is_no_forecast() -> None:
    model = Forecasts(lambda counts: (0.0, 0.0))
    prefill = {"load": 1.0, "short": 1.0}
    nothing: dict[str, Any] = {"first_tokens": 0, "ttft": (0,) * (len(SHARES) + 1), "overdue": 50, "prefill": prefill}
    (action,) = Figures(model).look(8, **nothing)
    assert (action.role, model.asked) == (P, [])


# --- a model of a service --------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A service in formulas. Prompts queue for prefill (M/M/1 with the workers' joint speed). Decode workers share the
    requests, and each further one in a batch makes its steps longer. An open loop has ``rate`` requests per second, a
    closed one ``clients`` that wait for their answers."""

    prefill: int
    decode: int
    prompt_tokens: float
    output_tokens: float
    rate: float = 0.0
    clients: int = 0
    prefill_tokens_s: float = 5000.0
    step_s: float = 0.01
    step_per_request_s: float = 0.002
    noise: random.Random = field(default_factory=lambda: random.Random(0))
    backlog: float = 0.0

    def itl_s(self, rate: float) -> float:
        """Time of a decode step at so many requests per second."""
        each = rate * self.output_tokens / self.decode * self.step_per_request_s
        most = self.step_s + 64 * self.step_per_request_s
        return most if each >= 1 else min(most, self.step_s / (1 - each))

    def served_rate(self) -> float:
        """Requests per second that it gets."""
        if not self.clients:
            return self.rate
        low, high = 0.0, 1e6
        for _ in range(60):
            rate = (low + high) / 2
            utilized = rate * self.prompt_tokens / (self.prefill * self.prefill_tokens_s)
            if utilized >= 1 or rate * (self.ttft_s(utilized) + self.output_tokens * self.itl_s(rate)) > self.clients:
                high = rate
            else:
                low = rate
        return low

    def ttft_s(self, utilized: float) -> float:
        return self.prompt_tokens / self.prefill_tokens_s / max(1e-3, 1 - utilized)

    def interval(self, begin_s: float, seconds: float = 1.0) -> Observation:
        """The figures of an interval."""
        rate = self.served_rate() * self.noise.uniform(0.9, 1.1)
        utilized = min(1.0, rate * self.prompt_tokens / (self.prefill * self.prefill_tokens_s))
        capacity = self.prefill * self.prefill_tokens_s / self.prompt_tokens
        self.backlog = max(0.0, self.backlog + (rate - capacity) * seconds)
        ttft_s = self.ttft_s(utilized) + self.backlog / capacity
        served = min(rate, capacity)
        itl_s = self.itl_s(served)
        batch = served * self.output_tokens * itl_s / self.decode
        count = max(0, round(served * seconds))
        return Observation(
            begin_s,
            begin_s + seconds,
            RoleLoad(self.prefill, 0, 1.0 if self.backlog else utilized, 0.0, float(self.backlog > 0)),
            RoleLoad(self.decode, 0, min(1.0, batch / 64), batch, 0.0),
            _counts(count, lambda x: 1 - math.exp(-x * TTFT_S / ttft_s)),
            _counts(round(count * self.output_tokens), lambda x: min(1.0, max(0.0, x * ITL_S / itl_s - 0.5))),
            overdue=round(self.backlog) if self.backlog / capacity > TTFT_S else 0,
            requests=round(rate * seconds),
            first_tokens=count,
            prompt_tokens=round(count * self.prompt_tokens),
            output_tokens=round(count * self.output_tokens),
            in_flight=self.backlog + batch * self.decode + served * ttft_s,
        )

    def apply(self, action: Action) -> None:
        self.prefill, self.decode = action.after((self.prefill, self.decode))

    def forecasts(self) -> Forecasts:
        """What the formulas say of other numbers of workers."""

        @functools.cache
        def of(counts: Counts, *load: float) -> tuple[float, float]:
            other = replace(self, prefill=counts[0], decode=counts[1], noise=random.Random(1), backlog=0.0)
            for second in range(30):
                seen = other.interval(float(second))
            ttft, itl = seen.ttft, seen.itl
            return (
                sum(ttft[:-1]) / max(1, sum(ttft) + seen.overdue),
                sum(itl[:-1]) / sum(itl) if any(itl) else 1.0,
            )

        return Forecasts(lambda counts: of(counts, self.prompt_tokens, self.output_tokens, self.rate, self.clients))


def _counts(total: int, share_below: Callable[[float], float]) -> tuple[int, ...]:
    """So many durations over the buckets, by the share that takes at most so large a part of the objective."""
    bounds = [round(total * share_below(share)) for share in SHARES]
    return (bounds[0], *(b - a for a, b in itertools.pairwise(bounds)), total - bounds[-1])


def run(model: Model, controller: ScalingController, seconds: int, begin_s: float = 0.0) -> list[tuple[float, Action]]:
    """Let the controller act on the model, which obeys at once."""
    actions = []
    for second in range(seconds):
        action = controller.observe(model.interval(begin_s + second))
        if action is not None:
            actions.append((begin_s + second, action))
            model.apply(action)
            controller.acted(begin_s + second + 1)
    return actions


LOADS = st.fixed_dictionaries(
    {
        "prefill": st.integers(1, 4),
        "decode": st.integers(1, 4),
        "prompt_tokens": st.floats(10, 4000),
        "output_tokens": st.floats(1, 400),
        "noise": st.integers(0, 9).map(random.Random),
    }
)
OPEN = st.floats(0.5, 60).map(lambda rate: {"rate": rate})
CLOSED = st.integers(1, 200).map(lambda clients: {"clients": clients})
KINDS = st.sampled_from(
    [{}, {"controller": "workers", "max_workers": 9}, {"controller": "workers", "max_workers": 6, "max_prefill": 3}]
)


@settings(max_examples=20, deadline=None)
@given(LOADS, OPEN | CLOSED, KINDS)
def test_a_constant_load_comes_to_rest_within_the_bounds(
    load: dict[str, Any], loop: dict[str, Any], kind: dict[str, Any]
) -> None:
    check_rest(load, loop, kind)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(LOADS, OPEN | CLOSED, KINDS)
def test_many_constant_loads_come_to_rest(load: dict[str, Any], loop: dict[str, Any], kind: dict[str, Any]) -> None:
    check_rest(load, loop, kind)


def check_rest(
    load: dict[str, Any],
    loop: dict[str, Any],
    kind: dict[str, Any],
    forecasts: Callable[[Model], Forecasts | None] = lambda _: None,
) -> None:
    """AssertionError if half an hour of this load is not borne within the bounds, at rest after half of it."""
    model = Model(**load, **loop)
    total, rules = model.prefill + model.decode, config(**kind)
    controller = ScalingController(rules, forecasts(model))
    actions: list[tuple[float, Action]] = []
    for minute in range(30):
        actions += run(model, controller, 60, 60.0 * minute)
        assert model.prefill >= 1
        assert model.decode >= 1
        if rules.controller == "roles":
            assert model.prefill + model.decode == total
        else:
            assert model.prefill + model.decode <= max(total, rules.max_workers or 0)
            assert rules.max_prefill is None or model.prefill <= max(load["prefill"], rules.max_prefill)
    times_s = [time_s for time_s, _ in actions]
    assert all(b - a >= 2 * rules.hold_s for a, b in itertools.pairwise(times_s))
    assert all(time_s < 900 for time_s in times_s), f"{[(t, a.kind, a.role) for t, a in actions]}"


def wrong_forecasts(seed: int) -> Forecasts:
    """Draws."""
    chance = random.Random(seed)
    return Forecasts(lambda counts: (chance.random(), chance.random()))


@settings(max_examples=10, deadline=None)
@given(LOADS, OPEN | CLOSED, KINDS)
def test_a_constant_load_comes_to_rest_with_forecasts(
    load: dict[str, Any], loop: dict[str, Any], kind: dict[str, Any]
) -> None:
    check_rest(load, loop, kind, Model.forecasts)


@settings(max_examples=10, deadline=None)
@given(LOADS, OPEN, KINDS, st.integers(0, 9))
def test_a_constant_rate_comes_to_rest_with_wrong_forecasts(
    load: dict[str, Any], loop: dict[str, Any], kind: dict[str, Any], seed: int
) -> None:
    check_rest(load, loop, kind, lambda _: wrong_forecasts(seed))


def test_with_forecasts_one_action_answers_a_step_that_takes_five_without() -> None:
    found = {}
    for name in ("without", "with"):
        model = Model(2, 14, prompt_tokens=200, output_tokens=300, rate=2.2)
        controller = ScalingController(config(), model.forecasts() if name == "with" else None)
        assert run(model, controller, 60) == []
        model.prompt_tokens, model.output_tokens, model.rate = 500, 10, 45.0
        found[name] = [(at_s - 60, action.number) for at_s, action in run(model, controller, 240, 60.0)]
        assert model.prefill >= 6
    assert len(found["without"]) >= 4
    ((at_s, number),) = found["with"]
    assert number >= 4
    assert at_s < found["without"][-1][0] / 4


@pytest.mark.parametrize("forecasts", [False, True])
def test_a_load_step_is_answered_and_the_step_back_too(forecasts: bool) -> None:
    """1P2D, of which long prompts need two prefill workers and long outputs two decode workers."""
    model = Model(1, 2, prompt_tokens=200, output_tokens=300, rate=2.2)
    controller = ScalingController(config(), model.forecasts() if forecasts else None)
    for begin_s in (0.0, 600.0):
        assert run(model, controller, 120, begin_s) == [], "decode-heavy"
        model.prompt_tokens, model.output_tokens, model.rate = 500, 10, 10.5
        ((at_s, action),) = run(model, controller, 180, begin_s + 120)
        assert (action.kind, action.role) == ("flip", P)
        assert at_s - begin_s - 120 < 15
        model.prompt_tokens, model.output_tokens, model.rate = 200, 300, 2.2
        ((_, action),) = run(model, controller, 300, begin_s + 300)
        assert (action.kind, action.role) == ("flip", D)
        assert (model.prefill, model.decode) == (1, 2)
