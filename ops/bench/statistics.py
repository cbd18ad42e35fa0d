"""Mean and percentiles of a list of figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


def percentile(ordered: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) of ascending values, interpolated linearly; ValueError if there are none."""
    if not ordered:
        raise ValueError("no values")
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a figure is spread, in the figure's own unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The distribution of ``values``; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            mean=math.fsum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            count=len(ordered),
        )

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)
