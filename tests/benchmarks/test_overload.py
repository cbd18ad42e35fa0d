"""Windows of `benchmarks.overload` in which nothing came."""

from __future__ import annotations

import json

import pytest

from benchmarks.overload import Window, _capacity, _refusals


def test_a_window_without_an_answer_has_no_capacity() -> None:
    with pytest.raises(SystemExit, match="no request was answered within 2 s: give a longer --window-s"):
        _capacity(Window(2.0))
    assert _capacity(Window(2.0, answered_within=5)) == 2.5


def test_no_refusals_have_no_times() -> None:
    quantiles = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p100_ms"))
    assert _refusals(Window(1.0)) == {"count": 0, **quantiles, "within_50_ms": 0.0}
    json.dumps(_refusals(Window(1.0)), allow_nan=False)
    assert _refusals(Window(1.0, refused_ms=[60.0, 20.04]))["p50_ms"] == 60.0
