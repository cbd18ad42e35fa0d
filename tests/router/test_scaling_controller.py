"""The controller of roles and workers: on made-up figures, and on a model of a service under constant and changing
loads."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.scaling import SHARES
from pdserve.core.config import ScalingConfig
from pdserve.core.worker import Role
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

    def __init__(self, **changes: Any) -> None:
        self.controller = ScalingController(config(**changes))
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
    full = {"controller": "workers", "max_workers": 3, "min_decode": 2}
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
        change = -1 if action.kind == "remove" else 1
        if action.role is P:
            self.prefill += change
        else:
            self.decode += change
        if action.kind == "flip":
            if action.role is P:
                self.decode -= 1
            else:
                self.prefill -= 1


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


def check_rest(load: dict[str, Any], loop: dict[str, Any], kind: dict[str, Any]) -> None:
    """AssertionError if half an hour of this load is not borne within the bounds, at rest after half of it."""
    model = Model(**load, **loop)
    total, rules = model.prefill + model.decode, config(**kind)
    controller = ScalingController(rules)
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


def test_a_load_step_is_answered_and_the_step_back_too() -> None:
    """1P2D, of which long prompts need two prefill workers and long outputs two decode workers."""
    model = Model(1, 2, prompt_tokens=200, output_tokens=300, rate=2.2)
    controller = ScalingController(config())
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
