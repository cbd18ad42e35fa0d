"""A delay planted in one stage shows up in that stage of the breakdown, and in no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from core.timeline import STAGES, UNATTRIBUTED, Figure
from pdserve import Client
from pdserve.client.generation import Generation
from tests.local_cluster import local_cluster, undisturbed
from tests.random_models import save_random_model

DELAY_MS = 80.0
REQUESTS = 4
HANDOFF = ("kv_exposed", "decode_queue", "first_decode")
IN_TTFT = [stage.name for stage in STAGES[Figure.TTFT]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


def least_ms(results: Sequence[Generation], figure: Figure) -> dict[str, float]:
    """The least that any of the results took for each stage of a figure; of what is unattributed, its least size."""
    breakdowns = [result.breakdowns[figure].stages_ms for result in results]
    return {stage: min((each[stage] for each in breakdowns), key=abs) for stage in breakdowns[0]}


@pytest.mark.parametrize("stage", ["network", *IN_TTFT, *HANDOFF])
def test_delay_shows_in_its_stage_alone(model: Path, stage: str) -> None:
    """A planted delay is in its stage of every request, and a busy machine adds to any stage of some requests. So a
    stage has none of the delay if one request got through it quicker than that."""
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
        "testing": {"delay_ms": {stage: DELAY_MS}},
    }
    with local_cluster(settings) as cluster, Client(cluster.target) as client:
        for mode in ("pd", "colocated"):
            if mode == "colocated" and stage in ("reserve", "kv_exposed"):
                continue  # it has no such stage
            results: list[Generation] = []

            def measure(mode: str = mode, results: list[Generation] = results) -> list[Generation]:
                results += [client.generate([7] * 50, max_tokens=3, mode=mode).result() for _ in range(REQUESTS)]
                return results

            def check(results: list[Generation]) -> None:
                for figure in results[0].breakdowns:
                    planted = stage if figure is Figure.TTFT_DECODE or stage not in HANDOFF else None
                    times = 2 if stage == "network" else 1  # there and back
                    for name, value_ms in least_ms(results, figure).items():
                        if name == planted:
                            assert DELAY_MS - 0.5 <= value_ms < DELAY_MS * (times + 0.5), (figure, value_ms)
                        elif name == UNATTRIBUTED:
                            assert abs(value_ms) <= 2.0, (figure, value_ms)
                        else:
                            assert value_ms < DELAY_MS / 4, (figure, name, value_ms)

            undisturbed(measure, check)
            for result in results:
                for figure, breakdown in result.breakdowns.items():
                    if figure is Figure.TTFT_DECODE or stage not in HANDOFF:
                        assert breakdown.stages_ms[stage] + 0.5 >= DELAY_MS, breakdown
