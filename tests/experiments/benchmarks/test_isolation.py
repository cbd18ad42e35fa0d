"""`experiments.benchmarks.isolation` with a real worker."""

from __future__ import annotations

import os

import pytest

from experiments.benchmarks import isolation


def test_a_request_that_ends_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the model is, the engine has steps in every turn."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("it needs a second core, and this process may use one only")
    monkeypatch.setattr(isolation, "_MOST_TOKENS", 200)
    measured = isolation.measure_isolation("tiny", cores, turns=1, turn_s=1.5)
    assert all(measured[f"{kind}_p50_ms"] > 0 for kind in ("quiet", "busy", "hammered"))
