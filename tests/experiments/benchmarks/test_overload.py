"""Windows of `experiments.benchmarks.overload` in which nothing was refused."""

from __future__ import annotations

import json

from experiments.benchmarks.frame import _plain, errors_of, frame
from experiments.benchmarks.overload import refusals


def test_no_refusals_have_no_times() -> None:
    quantiles = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p100_ms"))
    nothing = frame([]).assign(took_ms=[], refused=[])
    figures = _plain(refusals(nothing))
    assert figures == {"count": 0, **quantiles, "within_50_ms": 0.0}
    json.dumps(figures, allow_nan=False)
    assert errors_of(nothing) == {}
