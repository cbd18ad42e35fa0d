"""`benchmarks.role_flips`: its closed loops, and its load step, after which goodput recovers and nothing is lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from benchmarks.role_flips import KINDS, TTFT_MS, Kind, closed_loop, run_trace, service, summary
from pdserve import AsyncClient
from tests.local_cluster import free_port
from tests.pdserve.scripted_service import ScriptedService

log = logging.getLogger(__name__)
PHASE_S = 30.0
ITL_MS = 1000.0


async def test_a_closed_loop_waits_for_its_first_answer() -> None:
    with ScriptedService() as service:
        async with AsyncClient(service.target) as client:
            assert len(await closed_loop(client, Kind(3, 2, clients=2), 1e-6)) == 1


async def test_a_closed_loop_whose_requests_fail_is_an_error() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(RuntimeError, match="a request of the closed loop failed: "):
            await closed_loop(client, Kind(3, 2, clients=1), 0.1)


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_goodput_recovers_after_a_load_step() -> None:
    async def bears(target: str) -> float:
        async with AsyncClient(target) as client:
            await closed_loop(client, KINDS["prompts"], 4.0)
            return len(await closed_loop(client, KINDS["prompts"], 8.0)) / 8.0

    with service() as (target, _):
        rate = asyncio.run(bears(target))
    scaling = {"controller": "roles", "ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "interval_s": 0.5, "hold_s": 4}
    with service({"scaling": scaling}) as (target, _):
        trace = asyncio.run(run_trace(target, {"outputs": 2.0, "prompts": 1.2 * rate}, PHASE_S))
    figures = summary(trace, PHASE_S, ITL_MS)
    log.info("%s", figures)
    assert (figures["errors"], figures["retried"]) == (0, 0), "nothing is lost"
    assert any("becomes a prefill worker" in action for _, action in figures["actions"])
    ((acted_s, _), *_) = trace.actions
    assert PHASE_S < acted_s < 2 * PHASE_S

    def met(begin_s: float, end_s: float) -> float:
        sent = trace.between(begin_s, end_s)
        return sum(each.ttft_ms <= TTFT_MS for each in sent) / len(sent)

    assert met(0.0, PHASE_S) > 0.9
    late, recovered = met(acted_s - 4.0, acted_s), met(3 * PHASE_S - 10.0, 3 * PHASE_S)
    assert late < 0.5
    assert recovered > 0.8
