"""A service-level objective: what a request must meet to count as good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ops.bench.statistics import percentile
from pdserve.client.generation import Generation
from pdserve.core.errors import InvalidRequest

KEYS = ("ttft", "ttft_decode", "itl", "tpot")


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits in milliseconds by figure. ``itl`` holds for 99 % of a request's own gaps, ``tpot`` for their mean; a
    figure that a request does not have (one token has no gaps) is met."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> SLO:
        """``ttft=200,itl=50`` (milliseconds; ``200ms`` and ``0.2s`` are understood); `InvalidRequest` otherwise."""
        limits_ms: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = part.partition("=")
            if key not in KEYS:
                raise InvalidRequest(f"slo: {key!r} is none of {', '.join(KEYS)}")
            limits_ms[key] = _milliseconds(value.strip(), part)
        if not limits_ms:
            raise InvalidRequest("slo: is empty; write for example ttft=200,itl=50")
        return cls(limits_ms)

    def met_by(self, generation: Generation) -> bool:
        """Whether the request met every limit."""
        figures = {
            "ttft": generation.ttft_ms,
            "ttft_decode": generation.ttft_decode_ms,
            "itl": percentile(sorted(generation.itl_ms), 99) if generation.itl_ms else None,
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
        raise InvalidRequest(f"slo: {part!r} has no positive limit; write for example ttft=200,itl=50 (milliseconds)")
    return limit_ms
