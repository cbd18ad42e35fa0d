"""Intervals: estimates with the range in which the true value lies, and how they are written.

Differences of pairs are estimated by their median: one pair that something else disturbed moves a mean anywhere, and
the median to the next pair. Its interval lies between two of the ordered differences, with a confidence that is exact
whatever their distribution is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

CONFIDENCE = 0.95
MIN_VALUES = 6
"""Fewer independent values than this have no interval. From six on the smallest and the largest one have the median
between them in more than `CONFIDENCE` of all cases."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean or median (``estimate``) of ``n`` independent values, in their own unit, and the interval from ``lo`` to
    ``hi`` in which the true one lies with `CONFIDENCE`. Fewer than `MIN_VALUES` values have none: ``lo`` and ``hi`` are
    nan, and null in the plain form."""

    value: float
    lo: float
    hi: float
    n: int
    estimate: Literal["mean", "median"] = "mean"

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.lo)

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below 0; 0 if it contains 0, or there is none."""
        return int(self.lo > 0) - int(self.hi < 0)

    @property
    def half_width(self) -> float:
        """Half of ``hi - lo``; nan without an interval."""
        return (self.hi - self.lo) / 2

    @property
    def errors(self) -> tuple[float, float]:
        """How far the interval reaches below and above the estimate, as error bars have it; nan without one."""
        return self.value - self.lo, self.hi - self.value

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to a nanosecond of a millisecond figure. The estimate is called what it is."""
        lo, hi = (round(edge, 6) if self.known else None for edge in (self.lo, self.hi))
        return {self.estimate: round(self.value, 6), "lo": lo, "hi": hi, "n": self.n}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Interval:
        """The interval that `to_dict` wrote. A median may have the mean beside it."""
        estimate: Literal["mean", "median"] = "median" if "median" in plain else "mean"
        lo, hi = (math.nan if plain[edge] is None else float(plain[edge]) for edge in ("lo", "hi"))
        return cls(float(plain[estimate]), lo, hi, int(plain["n"]), estimate)

    def scaled(self, factor: float) -> Interval:
        """The interval times a positive number."""
        return replace(self, value=self.value * factor, lo=self.lo * factor, hi=self.hi * factor)

    def text(self, unit: str = "ms", form: str | Callable[[float], str] = "+") -> str:
        """``+1.2 ms [0.9, 1.5]``. ``form`` is the format of the numbers, where ``+`` is for the estimate only, or a
        function that writes one; without a precision there are as many digits as the interval's width gives a meaning
        to. An empty ``unit`` is left out. Without an interval the text says so."""
        if callable(form):
            value, lo, hi = (form(each) for each in (self.value, self.lo, self.hi))
        else:
            plain = form.lstrip("+") or f".{self._decimals}f"
            value, lo, hi = (
                f"{self.value:{'+' * form.startswith('+')}z{plain}}",  # z: -0.04 is +0.0 and not -0.0
                f"{self.lo:{plain}}",
                f"{self.hi:{plain}}",
            )
        between = f"[{lo}, {hi}]" if self.known else f"(n={self.n}: no interval)"
        return f"{value}{unit and f' {unit}'} {between}"

    def written(self, value: float) -> str:
        """A number beside the interval, with the digits that its width gives a meaning to."""
        return f"{value:z.{self._decimals}f}"

    @property
    def _decimals(self) -> int:
        """Two digits of the interval's half width, but at most microseconds of a millisecond figure."""
        half = self.half_width
        return min(3, max(0, 1 - math.floor(math.log10(half)))) if half > 0 else 2


def interval_text(
    plain: Mapping[str, Any] | None, form: str | Callable[[float], str] = "", *, factor: float = 1.0
) -> str:
    """The cell of a table for an interval of a summary, times ``factor``: ``1.23 [0.98, 1.51]``, or – without one."""
    return "–" if plain is None else Interval.from_dict(plain).scaled(factor).text("", form)


def apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Whether the interval ``a`` of a summary is wholly above (1) or below (-1) the interval ``b``; 0 if they overlap,
    or one of them has none."""
    of_a, of_b = Interval.from_dict(a), Interval.from_dict(b)
    return int(of_a.lo > of_b.hi) - int(of_a.hi < of_b.lo)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The median of independent ``values`` with an interval that holds the true median with ``confidence``; None
    without values.

    The k-th smallest and the k-th largest value have the median between them unless fewer than k values fall on one of
    its sides, which is a matter of coin tosses, whatever the distribution is. The edges are interpolated between the
    last k with enough confidence and the next (Hettmansperger and Sheather, 1986), which meets the confidence within a
    few percent. From nine values on an outlier moves neither edge, however far off it is."""
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    median = statistics.median(ordered)
    if n < MIN_VALUES:
        return Interval(median, math.nan, math.nan, n, "median")
    tosses, tail = 2**n, (1 - confidence) / 2
    k, outcomes = 1, 1  # outcomes: of all tosses those with fewer than k heads
    while (more := outcomes + math.comb(n, k)) / tosses <= tail:
        k, outcomes = k + 1, more
    beyond = (tail - outcomes / tosses) / ((more - outcomes) / tosses)
    share = min(1.0, max(0.0, (n - k) * beyond / (k + (n - 2 * k) * beyond)))
    lo = (1 - share) * ordered[k - 1] + share * ordered[k]
    hi = (1 - share) * ordered[n - k] + share * ordered[n - k - 1]
    return Interval(median, lo, hi, n, "median")
