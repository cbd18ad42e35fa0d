"""Delays planted in all stages: every stage of the breakdown shows its own, and no other. Each worker's clock is hours
away from the gateway's, where the kernel allows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.core.timeline import STAGES, UNATTRIBUTED, Figure
from tests.local_cluster import local_cluster
from tests.planted.clocks import shifted, time_namespaces_problem
from tests.planted.late_wire import late_wire
from tests.random_models import save_random_model

HANDOFF = ("kv_exposed", "decode_queue", "first_decode")
FETCHED = "prefix_fetch"  # only of requests whose prefix is fetched: tests.e2e.test_prefix_fetch
IN_TTFT = [stage.name for stage in STAGES[Figure.TTFT] if stage.name not in (*HANDOFF, FETCHED)]
DELAYS_MS = dict.fromkeys(("network", *IN_TTFT, *HANDOFF), 200.0)
REQUESTS = 4
MODES = ("pd", "colocated")
Results = dict[str, list[Generation]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Some requests of each mode."""
    settings = {
        "model": {"path": str(save_random_model(tmp_path_factory.mktemp("models"), "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
    }
    ahead = {"prefill-0": lambda: shifted(7_000), "decode-0": lambda: shifted(50_000)}
    in_processes = {stage: delay_ms for stage, delay_ms in DELAYS_MS.items() if stage != "network"}
    with (
        local_cluster(
            settings, delays_ms=in_processes, in_worker={} if time_namespaces_problem() else ahead
        ) as cluster,
        late_wire(cluster.target, DELAYS_MS["network"] / 1e3) as target,
        Client(target) as client,
    ):
        yield {
            mode: [client.generate([7] * 50, max_tokens=3, mode=mode).result() for _ in range(REQUESTS)]
            for mode in MODES
        }


def lengths_ms(results: Sequence[Generation], figure: Figure, stage: str) -> list[float]:
    return [result.breakdowns[figure].stages_ms[stage] for result in results]


@pytest.mark.parametrize("stage", DELAYS_MS)
def test_delay_shows_in_its_stage_alone(results: Results, stage: str) -> None:
    """A planted delay is in its stage of every request. A busy machine adds to any stage of some requests: the quickest
    of them through a stage shows that no other delay is in it."""
    for mode in MODES:
        if mode == "colocated" and stage == "kv_exposed":
            assert all(stage not in shown.stages_ms for each in results[mode] for shown in each.breakdowns.values())
            continue
        for figure in Figure if stage not in HANDOFF else (Figure.TTFT_DECODE,):
            errors = [result.breakdowns[figure].clock_error_ms for result in results[mode]]
            lengths = lengths_ms(results[mode], figure, stage)
            delay_ms = DELAYS_MS[stage]
            assert all(ms + error_ms + 0.5 >= delay_ms for ms, error_ms in zip(lengths, errors, strict=True)), lengths
            assert min(lengths) < (3 if stage == "network" else 2) * delay_ms, "a network has two directions"


@pytest.mark.parametrize("mode", MODES)
def test_the_stages_are_all_of_the_time(results: Results, mode: str) -> None:
    for figure in Figure:
        for result in results[mode]:
            breakdown = result.breakdowns[figure]
            assert sum(breakdown.stages_ms.values()) == pytest.approx(breakdown.total_ms)
            # In ttft all hops are with one worker, so that its offset cancels; in ttft_decode it does not.
            assert (breakdown.clock_error_ms > 0) == ((mode, figure) == ("pd", Figure.TTFT_DECODE))
        assert min(abs(ms) for ms in lengths_ms(results[mode], figure, UNATTRIBUTED)) < min(DELAYS_MS.values()) / 2
