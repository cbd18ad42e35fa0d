"""Intervals of medians, and how intervals are written."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.core.interval import Interval, interval_text, median_interval

QUIET_512 = (-14.5, -5.7, -2.3, 3.1, 8.2, 9.5, 97.1, 150.8)
QUIET_128 = (-0.2, 0.1, 0.3, 1.9, 2.0, 9.4, 14.7, 171.4)
LOADED_512 = (
    -185.3,
    -585.2,
    -219.5,
    -73.1,
    -67.7,
    180.8,
    212.1,
    -388.3,
    113.4,
    -319.4,
    264.4,
    106.3,
    -971.0,
    1406.7,
    -1314.8,
    229.9,
    221.9,
    -634.8,
    -417.0,
    273.8,
    -67.1,
    282.3,
    97.8,
    93.2,
    0.2,
    -36.8,
    -17.5,
    630.5,
    35.7,
    -32.4,
    115.0,
    -40.7,
    -72.2,
    80.8,
    -33.2,
    32.0,
    -1259.2,
    221.7,
    45.8,
    -24.5,
    -43.8,
    -2456.8,
    -326.4,
    -106.1,
    -5123.8,
    -832.6,
    -41.4,
    95.0,
    154.5,
    42.5,
    18.9,
    53.3,
    -817.7,
    783.8,
    67.8,
    -467.6,
    1.2,
    -372.5,
    -1006.1,
    354.2,
    180.3,
    418.0,
    55.4,
    90.8,
    -163.7,
    210.8,
    709.1,
    117.0,
    95.5,
    154.5,
    156.1,
    -34.5,
    173.4,
    -27.1,
    -19.5,
    298.6,
    13.8,
    -128.2,
    136.3,
    -74.0,
)
"""Recorded differences of pairs, in ms: of 512 and 128 tokens on a quiet machine of 2 cores, and of 512 tokens on one
whose cores others used as well."""


def test_one_disturbed_pair_does_not_decide_a_median() -> None:
    for recorded, median_ms in ((QUIET_512, 5.65), (QUIET_128, 1.95)):
        interval = median_interval(recorded)
        assert interval is not None
        assert interval.value == pytest.approx(median_ms)
        calm, wild = [*recorded, 4.0], [*recorded[:-1], 1e6, 4.0]
        assert median_interval(calm) == median_interval(wild)


@pytest.mark.parametrize("n", [6, 7, 8, 12, 20, 40])
@pytest.mark.parametrize("outliers", [0.0, 0.15])
@pytest.mark.parametrize("recorded", [QUIET_512, QUIET_128, LOADED_512], ids=["512", "128", "512-loaded"])
def test_intervals_of_a_median_cover_it_as_often_as_they_say(
    recorded: tuple[float, ...], outliers: float, n: int
) -> None:
    """1,000 draws of recorded differences, blurred by a ms so that they are not the same few numbers over and over. An
    outlier is one more disturbance of 300 ms on average, in either arm."""
    draw = np.random.default_rng(n)

    def differences(count: int) -> NDArray[np.float64]:
        chosen = draw.choice(recorded, count) + draw.normal(0.0, 1.0, count)
        planted = draw.exponential(300.0, count) * draw.choice((-1.0, 1.0), count)
        return np.where(draw.random(count) < outliers, chosen + planted, chosen)

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
