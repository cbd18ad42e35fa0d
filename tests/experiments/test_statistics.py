"""Means, intervals, and the order of the arms."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.statistics import Interval, abba, difference_interval, interval_text, mean_interval, percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES)
def test_the_interval_holds_the_mean(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval is not None
    assert interval.mean == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert interval.lo <= interval.mean + 1e-6
    assert interval.mean <= interval.hi + 1e-6
    assert interval.n == len(values)


def test_the_same_values_and_seed_give_the_same_interval() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert mean_interval(values, 3) == mean_interval(values, 3)


@pytest.mark.parametrize("n", [5, 8, 30])
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
    """Two rounds in which all requests fared alike say as much as two values, however many requests they had."""
    values = [0.0] * 50 + [1.0] * 50
    alone, grouped = mean_interval(values), mean_interval(values, groups=[index // 50 for index in range(100)])
    assert alone is not None
    assert grouped is not None
    assert grouped.mean == alone.mean == 0.5
    assert grouped.n == 2
    assert (grouped.lo, grouped.hi) == (0.0, 1.0)
    assert alone.hi - alone.lo < 0.3
    difference = difference_interval(values, [2.0] * 4, groups=([index // 50 for index in range(100)], [0, 0, 1, 1]))
    assert difference == Interval(1.5, 1.0, 2.0, 2)


def test_an_interval_survives_its_plain_form() -> None:
    interval = Interval(1.5, 1.25, 2.0, 7)
    assert Interval.from_dict(interval.to_dict()) == interval


def test_neither_arm_is_first_more_often() -> None:
    order = abba("a", "b", 8)
    assert [pair[0] for pair in order] == ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert all(set(pair) == {"a", "b"} for pair in order)


def test_an_interval_is_written_in_one_way() -> None:
    interval = Interval(1.234, -0.5, 12.75, 5)
    assert interval.text() == "+1.23 ms [-0.50, 12.75]"
    assert interval.text("requests/s", ".1f") == "1.2 requests/s [-0.5, 12.8]"
    assert interval_text(interval.to_dict(), "+.1f") == "+1.2 [-0.5, 12.8]"
    assert interval_text(interval.to_dict(), ".0f", factor=100) == "123 [-50, 1275]"
    assert interval_text(interval.to_dict(), str) == "1.234 [-0.5, 12.75]"
    assert interval_text(None) == "–"
