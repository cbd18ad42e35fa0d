"""Delays planted in all stages: every stage of the breakdown shows its own, and none is counted twice. Each worker's
clock is hours away from the gateway's, where the kernel allows it."""

from __future__ import annotations

import pytest

from pdserve import Client
from pdserve.core.timeline import STAGES, UNATTRIBUTED, Figure
from tests.local_cluster import local_cluster
from tests.planted.clocks import shifted, time_namespaces_problem
from tests.planted.late_wire import late_wire
from tests.random_models import save_random_model

HANDOFF = ("kv_exposed", "decode_queue", "first_decode")
FETCHED = "prefix_fetch"  # only of requests whose prefix is fetched: tests.e2e.test_prefix_fetch
EXTERNAL = ("prefill_leg", "decode_leg")  # only of engines that are not pdserve's: tests/external_engines
IN_TTFT = [stage.name for stage in STAGES[Figure.TTFT] if stage.name not in (*HANDOFF, *EXTERNAL, FETCHED)]
STAGES_OF = {Figure.TTFT: ("network", *IN_TTFT), Figure.TTFT_DECODE: ("network", *IN_TTFT, *HANDOFF)}
DELAY_MS = 200.0
READ_MS = 0.5  # between two readings of a clock


def test_each_delay_shows_in_its_stage_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A busy machine adds to stages, and takes from none."""
    settings = {
        "model": {"path": str(save_random_model(tmp_path_factory.mktemp("models"), "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 64},
    }
    ahead = {"prefill-0": lambda: shifted(7_000), "decode-0": lambda: shifted(50_000)}
    in_processes = dict.fromkeys((*IN_TTFT, *HANDOFF), DELAY_MS)
    with (
        local_cluster(
            settings, delays_ms=in_processes, in_worker={} if time_namespaces_problem() else ahead
        ) as cluster,
        late_wire(cluster.target, DELAY_MS / 1e3) as target,
        Client(target) as client,
    ):
        results = {mode: client.generate([7] * 50, max_tokens=3, mode=mode).result() for mode in ("pd", "colocated")}
    for mode, result in results.items():
        for figure in Figure:
            breakdown = result.breakdowns[figure]
            assert sum(breakdown.stages_ms.values()) == pytest.approx(breakdown.total_ms)
            # In ttft all hops are with one worker, so that its offset cancels; in ttft_decode it does not.
            assert (breakdown.clock_error_ms > 0) == ((mode, figure) == ("pd", Figure.TTFT_DECODE))
            wanted = set(STAGES_OF[figure]) - ({"kv_exposed"} if mode == "colocated" else set())
            assert set(breakdown.stages_ms) == wanted | {UNATTRIBUTED}
            least_ms = dict.fromkeys(wanted, DELAY_MS) | {UNATTRIBUTED: 0.0}
            short = {
                stage: length_ms
                for stage, length_ms in breakdown.stages_ms.items()
                if length_ms + breakdown.clock_error_ms + READ_MS < least_ms[stage]
            }
            assert not short, (mode, figure, breakdown)
