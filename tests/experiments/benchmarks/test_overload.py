"""Windows of `experiments.benchmarks.overload` in which nothing was refused."""

from __future__ import annotations

import json

from experiments.benchmarks.overload import Window, _refusals


def test_no_refusals_have_no_times() -> None:
    quantiles = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p100_ms"))
    assert _refusals(Window(1.0)) == {"count": 0, **quantiles, "within_50_ms": 0.0}
    json.dumps(_refusals(Window(1.0)), allow_nan=False)
