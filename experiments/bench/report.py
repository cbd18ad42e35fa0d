"""Results of a benchmark run: distributions, service-level objectives, and the report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.load import Load, Outcome
from experiments.other_requests import OtherRequests
from experiments.request_row import RequestRow
from pdserve.client.generation import Generation
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady
from pdserve.core.interval import Interval, median_interval
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a figure, in its own unit. ``std`` is the sample's standard deviation (0 for a single value).
    ``percentiles`` are interpolated linearly."""

    mean: float
    std: float
    min: float
    max: float
    percentiles: Mapping[float, float]
    count: int

    @classmethod
    def of(cls, values: Iterable[float], percentiles: Sequence[float] = PERCENTILES) -> Distribution | None:
        """The distribution of ``values``; None if there are none."""
        measured = np.fromiter(values, float)
        if not measured.size:
            return None
        return cls(
            mean=float(measured.mean()),
            std=float(measured.std(ddof=1)) if measured.size > 1 else 0.0,
            min=float(measured.min()),
            max=float(measured.max()),
            percentiles=dict(zip(percentiles, map(float, np.percentile(measured, percentiles)), strict=True)),
            count=measured.size,
        )

    def to_dict(self) -> dict[str, float]:
        """Plain values; percentiles as ``p50``, ``p99.9``."""
        edges = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {**edges, **{f"p{p:g}": value for p, value in self.percentiles.items()}, "count": self.count}


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``50,90,99.9`` in ascending order; `InvalidRequest` unless all are between 0 and 100."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 100 for number in numbers):
        raise InvalidRequest(f"percentiles: {text!r} is not a list of numbers between 0 and 100, like 50,90,99")
    return tuple(numbers)


KEYS = ("ttft", "ttft_decode", "itl", "tpot", "e2e")
"""Figures that an SLO can limit, and that a report has: ``e2e`` is the time from the call to the end of the answer."""


@dataclass(frozen=True, slots=True)
class SLO:
    """A service-level objective: limits in milliseconds by figure. ``itl`` limits the 99th percentile of a request's
    own gaps, ``tpot`` their mean. Figures that a request does not have (a single token has no gaps) count as met."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Parse ``ttft=200,itl=50`` (milliseconds; ``200ms`` and ``0.2s`` are accepted); `InvalidRequest` otherwise."""
        limits_ms: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key not in KEYS:
                raise InvalidRequest(f"slo: {key!r} is none of {', '.join(KEYS)}")
            limits_ms[key] = _milliseconds(value, part)
        if not limits_ms:
            raise InvalidRequest("slo: is empty; write, for example, ttft=200,itl=50")
        return cls(limits_ms)

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits_ms.items())

    def met_by(self, generation: Generation, late_ms: float = 0.0) -> bool:
        """Whether the request met every limit, if it was sent ``late_ms`` after it was due."""
        g = generation
        decode_ms = None if g.ttft_decode_ms is None else g.ttft_decode_ms + late_ms
        return self._met(g.ttft_ms + late_ms, decode_ms, g.itl_ms, g.tpot_ms, g.total_ms + late_ms)

    def met_by_row(self, row: RequestRow) -> bool:
        """Whether a recorded request succeeded and met every limit."""
        return row.error is None and self._met(row.ttft_ms, row.ttft_decode_ms, row.itl_ms, row.tpot_ms, row.e2e_ms)

    def _met(
        self,
        ttft: float | None,
        ttft_decode: float | None,
        itl: Sequence[float],
        tpot: float | None,
        e2e: float | None,
    ) -> bool:
        values = {
            "ttft": ttft,
            "ttft_decode": ttft_decode,
            "itl": float(np.percentile(itl, 99)) if itl else None,
            "tpot": tpot,
            "e2e": e2e,
        }
        return all((value := values[key]) is None or value <= limit for key, limit in self.limits_ms.items())


def _milliseconds(value: str, part: str) -> float:
    number, factor = value, 1.0
    if value.endswith("ms"):
        number = value[:-2]
    elif value.endswith("s"):
        number, factor = value[:-1], 1e3
    try:
        limit_ms = float(number) * factor
    except ValueError:
        limit_ms = 0.0
    if not 0 < limit_ms < float("inf"):
        raise InvalidRequest(f"slo: {part!r} has no positive limit; write, for example, ttft=200,itl=50 (milliseconds)")
    return limit_ms


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A load and what was asked of it, from which everything else follows. ``leaked_blocks`` is None if it is unknown.
    ``planned`` is the number of requests that a complete run has at most; None if only its duration was given.
    ``mode`` is the one that was asked for, or "both". ``paired``: conversations 2k and 2k+1 were the same one in
    either mode, each with the service to itself. ``scheduled``: requests had times at which they were due; latencies
    count from them, and requests that were never sent miss the SLO. ``others``: the requests that the service had when
    the load began."""

    load: Load
    slo: SLO | None
    leaked_blocks: int | None
    planned: int | None = None
    paired: bool = False
    percentiles: Sequence[float] = PERCENTILES
    workload: str = ""
    mode: str = Mode.AUTO
    scheduled: bool = False
    others: OtherRequests | None = None

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The requests that ended."""
        return self.load.outcomes

    @property
    def duration_s(self) -> float:
        """Seconds from the load's start to its end."""
        return self.load.duration_s

    @property
    def partial(self) -> bool:
        """Whether the run was interrupted, so that only requests that had finished have an outcome."""
        return self.load.stopped

    @property
    def generations(self) -> list[Generation]:
        """The requests that succeeded."""
        return [outcome.generation for outcome in self.outcomes if outcome.generation is not None]

    @property
    def _served(self) -> list[tuple[Generation, float]]:
        """The successes, and how many milliseconds after it was due each was sent (0 if it had no such time)."""
        return [
            (outcome.generation, outcome.lag_s * 1e3 if self.scheduled else 0.0)
            for outcome in self.outcomes
            if outcome.generation is not None
        ]

    @property
    def failures(self) -> dict[str, int]:
        """Number of failed requests by error."""
        return dict(Counter(type(outcome.error).__name__ for outcome in self.outcomes if outcome.error is not None))

    @property
    def refusals(self) -> list[CapacityExceeded | NotReady]:
        """The errors of requests that the service refused."""
        errors = (outcome.error for outcome in self.outcomes)
        return [error for error in errors if isinstance(error, CapacityExceeded | NotReady)]

    @property
    def retry_after_ms(self) -> float | None:
        """Median of the refusals' retry delays; None if there are none."""
        waits_s = [error.retry_after_s for error in self.refusals if error.retry_after_s is not None]
        return statistics.median(waits_s) * 1e3 if waits_s else None

    @property
    def good_share(self) -> float | None:
        """Share of all requests that met the SLO; None without an SLO or without outcomes."""
        good = self.good_requests
        if good is None or not self.outcomes:
            return None
        return good / (len(self.outcomes) + (self.load.unsent if self.scheduled else 0))

    @property
    def modes(self) -> list[str]:
        """The modes in which requests ran."""
        return sorted({generation.mode for generation in self.generations})

    def distributions(self, mode: str | None = None) -> dict[str, Distribution | None]:
        """All figures (`KEYS`) in milliseconds, over all successes or those of one mode."""
        chosen = [(g, late_ms) for g, late_ms in self._served if mode in (None, g.mode)]
        values: dict[str, Iterable[float]] = {
            "ttft_ms": (g.ttft_ms + late_ms for g, late_ms in chosen),
            "ttft_decode_ms": (g.ttft_decode_ms + late_ms for g, late_ms in chosen if g.ttft_decode_ms is not None),
            "itl_ms": (gap for g, _ in chosen for gap in g.itl_ms),
            "tpot_ms": (g.tpot_ms for g, _ in chosen if g.tpot_ms is not None),
            "e2e_ms": (g.total_ms + late_ms for g, late_ms in chosen),
        }
        return {name: Distribution.of(of_figure, self.percentiles) for name, of_figure in values.items()}

    @property
    def output_tokens(self) -> int:
        """Tokens generated by the successes."""
        return sum(len(generation.token_ids) for generation in self.generations)

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens of the successes."""
        return self.output_tokens + sum(generation.prompt_tokens for generation in self.generations)

    def per_second(self, count: float) -> float:
        """``count`` over the run's duration."""
        return count / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def good_requests(self) -> int | None:
        """Successes that met the SLO; None without one."""
        return None if self.slo is None else sum(self.slo.met_by(g, late_ms) for g, late_ms in self._served)

    def added_ms(self, figure: Figure) -> Interval | None:
        """Median of pd minus colocated over the requests that were sent in both modes, with its interval; None without
        any, and unless they are ``paired``: requests that share the service also measure each other."""
        if not self.paired:
            return None
        by_pair: dict[tuple[int, int], dict[Mode, float]] = {}
        for outcome in self.outcomes:
            value = outcome.generation.figure_ms(figure) if outcome.generation else None
            if value is not None:
                by_pair.setdefault((outcome.index // 2, outcome.turn), {})[outcome.mode] = value
        added = [
            pair[Mode.PD] - pair[Mode.COLOCATED] for pair in by_pair.values() if {Mode.PD, Mode.COLOCATED} <= set(pair)
        ]
        return median_interval(added)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what ``pdserve bench --json`` prints."""
        good = self.good_requests
        return {
            "workload": self.workload,
            "mode": self.mode,
            "partial": self.partial,
            "planned": len(self.outcomes) if self.planned is None else self.planned,
            "requests": len(self.outcomes),
            "failed": len(self.outcomes) - len(self.generations),
            "failures": self.failures,
            "refused": {"requests": len(self.refusals), "retry_after_ms": self.retry_after_ms},
            "duration_s": self.duration_s,
            "unsent": self.load.unsent,
            "lag": asdict(lag) if (lag := self.load.lag) else None,
            **_plain(self.distributions()),
            "output_tokens_per_s": self.per_second(self.output_tokens),
            "total_tokens_per_s": self.per_second(self.total_tokens),
            "requests_per_s": self.per_second(len(self.generations)),
            "slo_ms": dict(self.slo.limits_ms) if self.slo else None,
            "goodput": None if good is None else {"requests_per_s": self.per_second(good), "share": self.good_share},
            "kv_bytes_equal_expected": all(g.kv_bytes == g.kv_bytes_expected for g in self.generations),
            "leaked_blocks": self.leaked_blocks,
            "by_mode": {mode: _plain(self.distributions(mode)) for mode in self.modes},
            "added_ms": {
                figure.value: None if (added := self.added_ms(figure)) is None else added.to_dict() for figure in Figure
            },
        }


def arms_to_dict(reports: Sequence[BenchReport]) -> dict[str, Any]:
    """Plain values of a comparison of modes under load: one report per mode. The last one has the leaked blocks."""
    return {
        "partial": any(report.partial for report in reports),
        "leaked_blocks": reports[-1].leaked_blocks,
        "arms": {report.mode: report.to_dict() for report in reports},
    }


def _plain(distributions: dict[str, Distribution | None]) -> dict[str, dict[str, float] | None]:
    return {name: distribution.to_dict() if distribution else None for name, distribution in distributions.items()}
