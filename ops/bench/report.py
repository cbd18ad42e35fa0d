"""Results of a benchmark run: distributions, service-level objectives, and the report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ops.bench.load import Outcome
from pdserve.client.generation import Generation
from pdserve.core.errors import CapacityExceeded, InvalidRequest, NotReady
from pdserve.core.request import Mode
from pdserve.core.timeline import Figure


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a figure, in its own unit. Percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The distribution of ``values``; None if there are none."""
        measured = np.fromiter(values, float)
        if not measured.size:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(measured, (50, 90, 99)))
        return cls(float(measured.mean()), p50, p90, p99, measured.size)

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


KEYS = ("ttft", "ttft_decode", "itl", "tpot")


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
            key, _, value = part.partition("=")
            if key not in KEYS:
                raise InvalidRequest(f"slo: {key!r} is none of {', '.join(KEYS)}")
            limits_ms[key] = _milliseconds(value.strip(), part)
        if not limits_ms:
            raise InvalidRequest("slo: is empty; write, for example, ttft=200,itl=50")
        return cls(limits_ms)

    def met_by(self, generation: Generation) -> bool:
        """Whether the request met every limit."""
        figures = {
            "ttft": generation.ttft_ms,
            "ttft_decode": generation.ttft_decode_ms,
            "itl": float(np.percentile(generation.itl_ms, 99)) if generation.itl_ms else None,
            "tpot": generation.tpot_ms,
        }
        return all((value := figures[key]) is None or value <= limit for key, limit in self.limits_ms.items())


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
    """A run's outcomes and duration, from which everything else follows. ``leaked_blocks`` is None if it is unknown.
    ``planned`` is the number of requests of an interrupted run, None for a complete one."""

    outcomes: Sequence[Outcome]
    duration_s: float
    slo: SLO | None
    leaked_blocks: int | None
    planned: int | None = None

    @property
    def partial(self) -> bool:
        """Whether the run was interrupted, so that only requests that had finished have an outcome."""
        return self.planned is not None

    @property
    def generations(self) -> list[Generation]:
        """The requests that succeeded."""
        return [outcome.generation for outcome in self.outcomes if outcome.generation is not None]

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
        return None if good is None or not self.outcomes else good / len(self.outcomes)

    @property
    def modes(self) -> list[str]:
        """The modes in which requests ran."""
        return sorted({generation.mode for generation in self.generations})

    def distributions(self, mode: str | None = None) -> dict[str, Distribution | None]:
        """TTFT, TTFT_DECODE, ITL and TPOT in milliseconds, over all successes or those of one mode."""
        chosen = [g for g in self.generations if mode in (None, g.mode)]
        return {
            "ttft_ms": Distribution.of(g.ttft_ms for g in chosen),
            "ttft_decode_ms": Distribution.of(g.ttft_decode_ms for g in chosen if g.ttft_decode_ms is not None),
            "itl_ms": Distribution.of(gap for g in chosen for gap in g.itl_ms),
            "tpot_ms": Distribution.of(g.tpot_ms for g in chosen if g.tpot_ms is not None),
        }

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
        return None if self.slo is None else sum(self.slo.met_by(generation) for generation in self.generations)

    def added_ms(self, figure: Figure) -> float | None:
        """Median of pd minus colocated over the prompts that were sent in both modes; None without any."""
        by_prompt: dict[int, dict[Mode, float]] = {}
        for outcome in self.outcomes:
            value = outcome.generation.figure_ms(figure) if outcome.generation else None
            if value is not None:
                by_prompt.setdefault(outcome.prompt, {})[outcome.mode] = value
        added = [
            pair[Mode.PD] - pair[Mode.COLOCATED]
            for pair in by_prompt.values()
            if {Mode.PD, Mode.COLOCATED} <= set(pair)
        ]
        return statistics.median(added) if added else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what ``pdserve bench --json`` prints."""
        good = self.good_requests
        return {
            "partial": self.partial,
            "planned": len(self.outcomes) if self.planned is None else self.planned,
            "requests": len(self.outcomes),
            "failed": len(self.outcomes) - len(self.generations),
            "failures": self.failures,
            "refused": {"requests": len(self.refusals), "retry_after_ms": self.retry_after_ms},
            "duration_s": self.duration_s,
            **_plain(self.distributions()),
            "output_tokens_per_s": self.per_second(self.output_tokens),
            "total_tokens_per_s": self.per_second(self.total_tokens),
            "requests_per_s": self.per_second(len(self.generations)),
            "slo_ms": dict(self.slo.limits_ms) if self.slo else None,
            "goodput": None if good is None else {"requests_per_s": self.per_second(good), "share": self.good_share},
            "kv_bytes_equal_expected": all(g.kv_bytes == g.kv_bytes_expected for g in self.generations),
            "leaked_blocks": self.leaked_blocks,
            "by_mode": {mode: _plain(self.distributions(mode)) for mode in self.modes},
            "added_ms": {figure.value: self.added_ms(figure) for figure in Figure},
        }


def _plain(distributions: dict[str, Distribution | None]) -> dict[str, dict[str, float] | None]:
    return {name: distribution.to_dict() if distribution else None for name, distribution in distributions.items()}
