"""Predictions of steps: a fit finds what was planted, and a calculation is the arithmetic of the model."""

from __future__ import annotations

import random

import pytest

from checkpoints.arithmetic import ModelArithmetic, Part
from checkpoints.source import resolve_model
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams
from simulator.planning.devices import DEVICES, REACHED_BANDWIDTH, REACHED_FLOPS, STEP_S, device_kind
from simulator.planning.step_time import KNOTS, MeasuredSteps, StepShape

PLANTED = MeasuredSteps((0.03, 0.031, 0.035, 0.05, 0.12, 0.5, 2.0), 1e-4, 3e-7, 8e-6)


def drawn(count: int, noise: float) -> list[tuple[StepShape, float]]:
    """Steps whose time is planted, with noise."""
    draw = random.Random(3)
    steps = []
    for number in range(count):
        batch, tokens = (1, draw.randrange(2, 3000)) if number % 2 else (draw.randrange(1, 200), 1)
        shape = StepShape.plain(batch, tokens, draw.randrange(0, 2000), draw.choice((0, 0, draw.randrange(1, 30))))
        steps.append((shape, PLANTED.seconds(shape) * (1 + draw.gauss(0.0, noise))))
    return steps


def test_a_fit_finds_what_was_planted() -> None:
    steps = drawn(300, 0.02)
    fitted = MeasuredSteps.fit(steps[:200])
    exact = [(shape, PLANTED.seconds(shape)) for shape, _ in steps[200:]]
    assert fitted.error(exact) < 0.01
    assert max(abs(fitted.seconds(shape) / seconds - 1) for shape, seconds in exact) < 0.1
    assert fitted.pair_s == pytest.approx(PLANTED.pair_s, rel=0.1)
    assert fitted.read_s == pytest.approx(PLANTED.read_s, rel=0.1)
    assert list(fitted.at_rows) == sorted(fitted.at_rows)  # more rows never take less time


def test_a_fit_needs_steps() -> None:
    with pytest.raises(InvalidRequest, match="too few"):
        MeasuredSteps.fit(drawn(8, 0.0))


def test_steps_larger_than_the_measured_ones_go_on_as_those() -> None:
    steps = [each for each in drawn(400, 0.0) if each[0].rows <= 600]
    fitted = MeasuredSteps.fit([*steps, *((shape, PLANTED.seconds(shape)) for shape in [StepShape(1100, 1, 0, 0)] * 3)])
    low, knot, high = (fitted.seconds(StepShape(rows, 0, 0, 0)) for rows in (512, 1024, 4096))
    planted = (PLANTED.at_rows[5] - PLANTED.at_rows[4]) / (KNOTS[5] - KNOTS[4])
    assert (knot - low) / 512 == pytest.approx(planted, rel=0.1)
    assert (high - knot) / 3072 == pytest.approx(planted, rel=0.1)


def test_the_time_is_that_of_the_knots_and_goes_on_beyond_them() -> None:
    for rows, seconds in zip(KNOTS, PLANTED.at_rows, strict=True):
        assert PLANTED.seconds(StepShape(rows, 0, 0, 0)) == pytest.approx(seconds)
    beyond = PLANTED.seconds(StepShape(2 * KNOTS[-1] - KNOTS[-2], 0, 0, 0))
    assert beyond - PLANTED.at_rows[-1] == pytest.approx(PLANTED.at_rows[-1] - PLANTED.at_rows[-2])


def test_the_shape_of_scheduled_parts() -> None:
    params = SamplingParams()
    parts = [
        ScheduledSeq("a", [1] * 5, 7, [0, 1], False, params),
        ScheduledSeq("b", [1], 9, [2], True, params),
        ScheduledSeq("c", [1] * 3, 0, [3], True, params),
    ]
    # a attends to 8 + … + 12 tokens, c to 1 + 2 + 3
    assert StepShape.of(parts) == StepShape(rows=9, sampled=2, pairs=50 + 6, read=7 + 10)
    assert StepShape.plain(1, 5, 7)._replace(sampled=0) == StepShape.of(parts[:1])
    assert StepShape.plain(2, 1, 9) == StepShape.of([parts[1], parts[1]])


def test_calculated_steps_are_the_arithmetic_of_the_model() -> None:
    shape, kind = resolve_model("dummy:8b").shape, DEVICES["h100"]
    steps, model = kind.steps(shape, "bfloat16", 1), ModelArithmetic.of(shape, "bfloat16")
    flops_per_s, bytes_per_s = REACHED_FLOPS * kind.flops, REACHED_BANDWIDTH * kind.bandwidth
    for parts in ([Part(0, 2048, True)], [Part(1024, 1, True)] * 32):
        batch, tokens, context = len(parts), parts[0].rows, parts[0].start
        predicted = steps.seconds(StepShape.plain(batch, tokens, context)) - STEP_S
        # In the last layer only the sampled rows go on, which the calculation leaves out.
        assert predicted == pytest.approx(model.step(parts).roof_s(flops_per_s, bytes_per_s), rel=0.05)


def test_devices_together_are_faster_less_their_sums() -> None:
    shape, kind = resolve_model("dummy:8b").shape, DEVICES["h100"]
    step = StepShape.plain(1, 2048, 0)
    one, two = (kind.steps(shape, "bfloat16", devices).seconds(step) for devices in (1, 2))
    assert one / 2 < two < one


def test_devices_are_named_or_described() -> None:
    assert device_kind("h200").memory == 141e9
    given = device_kind("flops=1e12,bandwidth=2e12,memory=3e9,link=4e9,nic=5e9")
    assert (given.flops, given.nic) == (1e12, 5e9)
    for wrong in ("h300", "flops=1", "flops=x,bandwidth=2e12,memory=3e9,link=4e9,nic=5e9"):
        with pytest.raises(InvalidRequest, match="device"):
            device_kind(wrong)
