"""A delay planted in one stage shows up in that stage of the breakdown, and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.timeline import STAGES, UNATTRIBUTED, Figure
from pdserve import Client
from pdserve.client.generation import Generation
from tests.local_cluster import local_cluster
from tests.random_models import save_random_model

DELAY_MS = 80.0
SLACK_MS = 30.0  # what a busy machine may add to any stage
HANDOFF = ("kv_exposed", "decode_queue", "first_decode")
IN_TTFT = [stage.name for stage in STAGES[Figure.TTFT]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


def quickest(target: str, mode: str) -> Generation:
    with Client(target) as client:
        results = [client.generate([7] * 50, max_tokens=3, mode=mode).result() for _ in range(4)]
    return min(results, key=lambda result: result.ttft_decode_ms or 0.0)


@pytest.mark.parametrize("stage", ["network", *IN_TTFT, *HANDOFF])
def test_delay_shows_in_its_stage_alone(model: Path, stage: str) -> None:
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
        "testing": {"delay_ms": {stage: DELAY_MS}},
    }
    with local_cluster(settings) as cluster:
        for mode in ("pd", "colocated"):
            if mode == "colocated" and stage in ("reserve", "kv_exposed"):
                continue  # it has no such stage
            result = quickest(cluster.target, mode)
            for figure, breakdown in result.breakdowns.items():
                if figure is Figure.TTFT and stage in HANDOFF:
                    continue
                for name, value_ms in breakdown.stages_ms.items():
                    if name == stage:
                        assert value_ms + 0.5 >= DELAY_MS, (mode, figure, breakdown)
                        assert value_ms <= DELAY_MS * (2 if stage == "network" else 1) + SLACK_MS, (mode, breakdown)
                    else:
                        assert value_ms <= SLACK_MS, (mode, figure, name, breakdown)
                assert abs(breakdown.stages_ms[UNATTRIBUTED]) <= max(2.0, 0.05 * breakdown.total_ms)
