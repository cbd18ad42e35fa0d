"""Windows of `experiments.benchmarks.overload` in which nothing was refused."""

from __future__ import annotations

import json

from experiments.benchmarks.frame import Window
from experiments.benchmarks.overload import _refusals


def test_no_refusals_have_no_times() -> None:
    quantiles = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p100_ms"))
    refusals = _refusals(Window.of(1.0, []))
    assert refusals == {"count": 0, **quantiles, "within_50_ms": 0.0}
    json.dumps(refusals, allow_nan=False)
