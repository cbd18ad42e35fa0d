"""Arrival times: their rates, their spread, and what is refused."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import pytest

from experiments.workloads.arrivals import ClosedLoop, all_at_once, ramp, random_arrivals, timed_arrivals
from pdserve.core.errors import InvalidRequest


def first(times_s: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(times_s, count))


def gaps_of(times_s: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times_s)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_random_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    times_s = first(random_arrivals(50.0, 3, burstiness), 20_000)
    assert times_s == first(random_arrivals(50.0, 3, burstiness), 20_000)
    assert times_s != first(random_arrivals(50.0, 4, burstiness), 20_000)
    assert times_s[0] == 0
    gaps = gaps_of(times_s)
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02 / burstiness**0.5, rel=0.05)


@pytest.mark.parametrize(("a", "b"), [(10.0, 90.0), (90.0, 10.0), (0.0, 100.0), (100.0, 0.0), (50.0, 50.0)])
def test_a_ramp_changes_linearly(a: float, b: float) -> None:
    times_s = list(ramp(a, b, 400.0, 2))
    assert times_s[0] == 0 <= min(gaps_of(times_s))
    assert times_s[-1] < 400.0
    assert len(times_s) == pytest.approx(400 * (a + b) / 2, rel=0.03)
    for begin_s in range(0, 400, 50):
        middle = a + (b - a) * (begin_s + 25) / 400
        arrived = sum(begin_s <= at_s < begin_s + 50 for at_s in times_s)
        assert arrived == pytest.approx(50 * middle, rel=0.15)


def test_trace_times_can_be_speeded_up() -> None:
    assert list(timed_arrivals([0.0, 1.0, 3.0])) == [0.0, 1.0, 3.0]
    assert list(timed_arrivals([0.0, 1.0, 3.0], speed=2)) == [0.0, 0.5, 1.5]
    assert first(all_at_once(), 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: random_arrivals(0.0, 1), "rate"),
        (lambda: random_arrivals(-1.0, 1), "rate"),
        (lambda: random_arrivals(float("inf"), 1), "rate"),
        (lambda: random_arrivals(float("nan"), 1), "rate"),
        (lambda: random_arrivals(1.0, 1, 0.0), "burstiness"),
        (lambda: ramp(0.0, 0.0, 1.0, 1), "ramp"),
        (lambda: ramp(-1.0, 2.0, 1.0, 1), "ramp"),
        (lambda: ramp(1.0, float("inf"), 1.0, 1), "ramp"),
        (lambda: ramp(1.0, 2.0, 0.0, 1), "duration"),
        (lambda: ramp(1.0, 2.0, 1.0, 1, -1.0), "burstiness"),
        (lambda: timed_arrivals([0.0], 0.0), "speed"),
        (lambda: ClosedLoop(0), "concurrency"),
    ],
)
def test_wrong_arrivals_are_refused_when_they_are_made(make: Callable[[], object], option: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{option}: "):
        make()
