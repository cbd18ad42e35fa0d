"""Means with their bootstrap intervals, and the paired comparison of two arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95
_DRAWN_AT_ONCE = 4_000_000
MIN_REPEATS = 5
"""Fewer values than this give an interval that is declared too wide to rely on."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of ``n`` values, in their own unit, with its 95 % interval from ``lo`` to ``hi``."""

    mean: float
    lo: float
    hi: float
    n: int

    @property
    def wide(self) -> bool:
        """Whether there are too few values for the interval to be relied on."""
        return self.n < MIN_REPEATS

    def overlaps(self, other: Interval) -> bool:
        """Whether both intervals have a value in common."""
        return self.lo <= other.hi and other.lo <= self.hi

    def to_dict(self) -> dict[str, float | int]:
        """Plain values, rounded to a nanosecond of a millisecond figure."""
        return {key: value if key == "n" else round(value, 6) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Interval:
        """The interval that `to_dict` wrote."""
        return cls(float(plain["mean"]), float(plain["lo"]), float(plain["hi"]), int(plain["n"]))

    def text(self, unit: str = "ms", digits: int = 2) -> str:
        """``+1.23 ms [0.98, 1.51]``."""
        return f"{self.mean:+.{digits}f} {unit} [{self.lo:.{digits}f}, {self.hi:.{digits}f}]"


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean of ``values`` with its percentile bootstrap interval; None without values. The same values and seed
    give the same interval."""
    if not values:
        return None
    lo, hi = _bounds(_resampled_means(values, np.random.default_rng(seed)))
    return Interval(float(np.mean(values)), lo, hi, len(values))


def difference_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean of ``b`` minus the mean of ``a`` for two independent samples, with its bootstrap interval; None if one
    of them is empty. ``n`` is the smaller count."""
    if not a or not b:
        return None
    draw = np.random.default_rng(seed)
    of_a, of_b = (_resampled_means(values, draw) for values in (a, b))
    lo, hi = _bounds(of_b - of_a)
    return Interval(float(np.mean(b) - np.mean(a)), lo, hi, min(len(a), len(b)))


def _resampled_means(values: Sequence[float], draw: np.random.Generator) -> NDArray[np.float64]:
    """The means of `RESAMPLES` samples of as many ``values``, drawn with replacement; a part of them at a time, so that
    many values do not need much memory."""
    measured = np.asarray(values, float)
    at_once = max(1, _DRAWN_AT_ONCE // measured.size)
    counts = [min(at_once, RESAMPLES - begun) for begun in range(0, RESAMPLES, at_once)]
    means = [measured[draw.integers(0, measured.size, (count, measured.size))].mean(axis=1) for count in counts]
    return np.concatenate(means)


def _bounds(means: NDArray[np.float64]) -> tuple[float, float]:
    """The percentiles between which `CONFIDENCE` of the means lie."""
    tail = (1 - CONFIDENCE) / 2 * 100
    lo, hi = np.percentile(means, (tail, 100 - tail))
    return float(lo), float(hi)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, interpolated linearly; None without values."""
    return float(np.percentile(np.asarray(values, float), percent)) if values else None


def abba(first: str, second: str, pairs: int) -> list[tuple[str, str]]:
    """The order of two arms in each of ``pairs`` pairs: A B, B A, A B, ... Neither arm profits from being second, and
    a drift of the machine cancels out."""
    return [(first, second) if pair % 2 == 0 else (second, first) for pair in range(pairs)]
