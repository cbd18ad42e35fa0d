"""Intervals of medians, and how intervals are written."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.core.interval import Interval, interval_text, median_interval

QUIET_512 = (-14.5, -5.7, -2.3, 3.1, 8.2, 9.5, 97.1, 150.8)
QUIET_128 = (-0.2, 0.1, 0.3, 1.9, 2.0, 9.4, 14.7, 171.4)
"""Recorded differences of pairs, in ms: of 512 and 128 tokens on a quiet machine of 2 cores."""


def test_one_disturbed_pair_does_not_decide_a_median() -> None:
    for recorded, median_ms in ((QUIET_512, 5.65), (QUIET_128, 1.95)):
        interval = median_interval(recorded)
        assert interval is not None
        assert interval.value == pytest.approx(median_ms)
        calm, wild = [*recorded, 4.0], [*recorded[:-1], 1e6, 4.0]
        assert median_interval(calm) == median_interval(wild)


@pytest.mark.parametrize("n", [6, 7, 8, 12, 20, 40])
def test_intervals_of_a_median_cover_it_as_often_as_they_say(n: int) -> None:
    """1,000 draws of recorded differences, blurred by a ms so that they are not the same few numbers over and over. An
    outlier is one more disturbance of 300 ms on average, in either arm."""
    draw = np.random.default_rng(n)

    def differences(count: int) -> NDArray[np.float64]:
        chosen = draw.choice(QUIET_128, count) + draw.normal(0.0, 1.0, count)
        planted = draw.exponential(300.0, count) * draw.choice((-1.0, 1.0), count)
        return np.where(draw.random(count) < 0.15, chosen + planted, chosen)

    true = float(np.median(differences(1_000_000)))
    samples = [list(each) for each in differences(1000 * n).reshape(1000, n)]
    covered = {0.9: 0, 0.95: 0}
    for confidence in covered:
        for sample in samples:
            interval = median_interval(sample, confidence)
            assert interval is not None
            covered[confidence] += interval.lo <= true <= interval.hi
    assert 850 <= covered[0.9] <= 950
    assert 910 <= covered[0.95] <= 985


def test_an_interval_survives_its_plain_form() -> None:
    interval = Interval(1.5, 1.25, 2.0, 7)
    assert Interval.from_dict(interval.to_dict()) == interval
    median = Interval(1.5, 1.25, 2.0, 7, "median")
    assert Interval.from_dict({**median.to_dict(), "mean": 9.0}) == median


def test_an_interval_is_written_in_one_way() -> None:
    interval = Interval(1.234, -0.5, 12.75, 7)
    assert interval.text() == "+1.2 ms [-0.5, 12.8]"
    assert Interval(-0.04, -1.2, 0.8, 7).text() == "+0.0 ms [-1.2, 0.8]"
    assert interval.text("requests/s", ".0f") == "1 requests/s [-0, 13]"
    assert interval_text(interval.to_dict(), "+.1f") == "+1.2 [-0.5, 12.8]"
    assert interval_text(interval.to_dict(), ".0f", factor=100) == "123 [-50, 1275]"
    assert interval_text(interval.to_dict(), str) == "1.234 [-0.5, 12.75]"
    assert interval_text(None) == "–"


@pytest.mark.parametrize(
    ("half_width", "text"), [(400.0, "+101 ms"), (4.0, "+101.2 ms"), (0.4, "+101.23 ms"), (0.0001, "+101.235 ms")]
)
def test_digits_follow_the_intervals_width(half_width: float, text: str) -> None:
    value = 101.2346
    assert Interval(value, value - half_width, value + half_width, 9).text().startswith(f"{text} [")
