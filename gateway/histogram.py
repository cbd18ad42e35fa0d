"""Histograms of latencies that cost little where they are observed.

`prometheus_client.Histogram` takes a lock and searches its buckets one by one for every value. A gateway observes a
value for each token, and some twenty for each request, all on one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Series:
    """The values of one combination of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class LatencyHistogram(Collector):
    """A histogram in ``registry``, observed on one thread. ``bounds`` are the upper bounds of its buckets in seconds,
    ascending. A value equal to a bound is within it."""

    def __init__(
        self, name: str, what: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what, self._labels, self._bounds = name, what, tuple(labels), tuple(bounds)
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *values: str) -> Series:
        """The series with these values of the labels."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self._bounds)
        return series

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The metric as it is now."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in self._series.items():
            buckets = list(zip(names, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.total)
        yield family
