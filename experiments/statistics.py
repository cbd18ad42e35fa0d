"""Means with their bootstrap intervals, and the paired comparison of two arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
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
    measured = np.asarray(values, float)
    draw = np.random.default_rng(seed)
    means = measured[draw.integers(0, measured.size, (RESAMPLES, measured.size))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    lo, hi = np.percentile(means, (tail, 100 - tail))
    return Interval(float(measured.mean()), float(lo), float(hi), int(measured.size))


def difference_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean of ``b`` minus the mean of ``a`` for two independent samples, with its bootstrap interval; None if one
    of them is empty. ``n`` is the smaller count."""
    if not a or not b:
        return None
    draw = np.random.default_rng(seed)
    means = []
    for values in (a, b):
        measured = np.asarray(values, float)
        means.append(measured[draw.integers(0, measured.size, (RESAMPLES, measured.size))].mean(axis=1))
    tail = (1 - CONFIDENCE) / 2 * 100
    lo, hi = np.percentile(means[1] - means[0], (tail, 100 - tail))
    return Interval(float(np.mean(b) - np.mean(a)), float(lo), float(hi), min(len(a), len(b)))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, interpolated linearly; None without values."""
    return float(np.percentile(np.asarray(values, float), percent)) if values else None


def abba(first: str, second: str, pairs: int) -> list[tuple[str, str]]:
    """The order of two arms in each of ``pairs`` pairs: A B, B A, A B, ... Neither arm profits from being second, and
    a drift of the machine cancels out."""
    return [(first, second) if pair % 2 == 0 else (second, first) for pair in range(pairs)]
