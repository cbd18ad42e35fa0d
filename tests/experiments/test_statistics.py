"""Means and medians, and their intervals."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.statistics import difference_interval, mean_interval, percentile
from pdserve.core.interval import MIN_VALUES, Interval, median_interval

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=MIN_VALUES, max_size=40)


@given(VALUES)
def test_the_interval_holds_the_mean(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval is not None
    assert interval.value == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert interval.lo <= interval.value + 1e-6
    assert interval.value <= interval.hi + 1e-6
    assert interval.n == len(values)


def test_the_same_values_and_seed_give_the_same_interval() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert mean_interval(values, 3) == mean_interval(values, 3)


@pytest.mark.parametrize("n", [6, 8, 30])
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says(n: int) -> None:
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        interval = mean_interval(list(draw.normal(10.0, 3.0, n)))
        assert interval is not None
        hits += interval.lo <= 10.0 <= interval.hi
    assert 0.88 <= hits / 400 <= 0.98


def test_many_values_do_not_need_much_memory() -> None:
    values = list(np.random.default_rng(1).normal(10.0, 3.0, 50_000))
    tracemalloc.start()
    interval = mean_interval(values)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert interval is not None
    assert interval.lo < 10.0 < interval.hi
    assert interval.hi - interval.lo == pytest.approx(2 * 1.96 * 3.0 / np.sqrt(len(values)), rel=0.1)
    assert most_bytes < 2e8  # all of them at once: 1.6 GB


def test_a_difference_of_samples() -> None:
    interval = difference_interval([1.0] * 6, [3.0] * 8)
    assert interval == Interval(2.0, 2.0, 2.0, 6)
    assert difference_interval([], [1.0]) is None


def test_no_values_have_no_interval() -> None:
    assert mean_interval([]) is None
    assert percentile([], 50) is None


def test_values_of_a_group_count_once() -> None:
    """Six rounds in which all requests fared alike say as much as six values, however many requests they had."""
    values, rounds = [0.0] * 150 + [1.0] * 150, [index // 50 for index in range(300)]
    alone, grouped = mean_interval(values), mean_interval(values, groups=rounds)
    assert alone is not None
    assert grouped is not None
    assert grouped.value == alone.value == 0.5
    assert grouped.n == 6
    assert grouped.half_width > 0.4
    assert alone.half_width < 0.07
    difference = difference_interval(values, [2.0] * 12, groups=(rounds, [index // 2 for index in range(12)]))
    assert difference is not None
    assert (difference.value, difference.n) == (1.5, 6)
    assert difference.half_width > 0.4


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_independent_values_have_no_interval_and_say_so(n: int) -> None:
    values = [float(value) for value in range(40)]
    rounds = [index % n for index in range(40)]
    few = (
        median_interval(values[:n]),
        mean_interval(values[:n]),
        mean_interval(values, groups=rounds),
        difference_interval(values, values, groups=(rounds, rounds)),
    )
    for interval in few:
        assert interval is not None
        assert (interval.n, interval.known, interval.sign) == (n, False, 0)
        assert interval.to_dict() == {interval.estimate: interval.value, "lo": None, "hi": None, "n": n}
        assert f"(n={n}: no interval)" in interval.text()
        assert Interval.from_dict(interval.to_dict()).text() == interval.text()
