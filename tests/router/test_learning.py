"""The router teaches its cost model what its requests took, in virtual time and hence exactly."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import TransferTimeout
from pdserve.core.request import Mode
from router.cost_model import MIN_SAMPLES, Served
from tests.router.conftest import Cluster, MakeCluster

PREFILL, DECODE, LINK = "prefill cpu", "decode cpu", "within a host"


def notes(cluster: Cluster) -> list[Served]:
    """What the router gives the cost model from now on."""
    noted: list[Served] = []
    cluster.registry.cost_model.note = noted.append  # type: ignore[assignment, method-assign]
    return noted


async def serve(cluster: Cluster, count: int, mode: Mode, **request: int) -> None:
    for index in range(count):
        await cluster.served(cluster.record(mode=mode, name=f"r{index}", **request))  # type: ignore[arg-type]


async def test_it_learns_each_part_of_a_hand_off(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["p0"].delay_s = {"prefill": 0.1}
    cluster.fleet["d0"].delay_s = {"decode": 0.02, "decode_step": 0.01, "decode_more": 0.005}
    await serve(cluster, MIN_SAMPLES, Mode.PD, max_tokens=8)
    costs = cluster.registry.cost_model.refit()
    prefill, handoff, itl = (
        costs.prefill[PREFILL].at(1, 5, 0, 0),
        costs.handoff[LINK].at(1, 1024),
        costs.decode[DECODE].at(1, 1),
    )
    assert prefill.seconds == pytest.approx(0.1, rel=1e-3)
    assert handoff.seconds == pytest.approx(0.03, abs=0.002)  # the fake's hand-over polls every millisecond
    assert itl.seconds == pytest.approx(0.005, rel=1e-3)
    assert cluster.registry.cost_model.handoffs == costs.requests == MIN_SAMPLES
    assert costs.prefill.keys() == {PREFILL}
    assert cluster.registry.view().costs is costs


async def test_it_learns_colocated_requests_of_the_worker_they_ran_on(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=0)
    cluster.fleet["d0"].delay_s = {"run": 0.2, "run_more": 0.004}
    await serve(cluster, MIN_SAMPLES, Mode.COLOCATED, max_tokens=8)
    costs = cluster.registry.cost_model.refit()
    prefill, itl = costs.prefill[DECODE].at(1, 5, 0, 0), costs.decode[DECODE].at(1, 1)
    assert prefill.seconds == pytest.approx(0.2, rel=1e-3)
    assert itl.seconds == pytest.approx(0.004, rel=1e-3)
    assert costs.handoff == {}


async def test_prompts_whose_logprobs_are_computed_teach_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    await serve(cluster, MIN_SAMPLES, Mode.PD, max_tokens=8, prompt_logprobs=1)
    costs = cluster.registry.cost_model.refit()
    assert (costs.requests, costs.prefill) == (0, {})


async def test_waiting_for_room_is_not_the_hand_offs_cost(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.fleet["d0"].delay_s = {"room": 0.5, "decode": 0.02}
    await serve(cluster, MIN_SAMPLES, Mode.PD)
    handoff = cluster.registry.cost_model.refit().handoff[LINK].at(1, 1024)
    assert handoff.seconds == pytest.approx(0.02, abs=0.002)


async def test_cached_tokens_are_not_computed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    noted = notes(cluster)
    cluster.fleet["p0"].cached_tokens = 4
    await serve(cluster, 1, Mode.PD)
    assert [served.uncached_tokens for served in noted] == [1]


async def test_what_waits_before_a_prompt_and_what_decodes_beside_it_is_counted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=0)
    noted = notes(cluster)
    cluster.fleet["d0"].delay_s = {"run": 0.1, "run_more": 0.01}

    async def one(name: str, at_s: float, tokens: int) -> None:
        await asyncio.sleep(at_s)
        await cluster.served(cluster.record((1,) * tokens, name=name, mode=Mode.COLOCATED, max_tokens=21))

    await asyncio.gather(one("a", 0.0, 5), one("b", 0.05, 7), one("c", 0.21, 9))
    assert [(s.uncached_tokens, s.tokens_ahead, s.decoding_beside) for s in noted] == [(5, 0, 0), (7, 5, 0), (9, 0, 2)]
    assert [s.decoding for s in noted] == [1.5, 2.0, 1.5]
    cluster.check_idle()
    assert [worker.decoding for worker in cluster.registry.workers] == [0]


async def test_a_retry_teaches_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    noted = notes(cluster)
    cluster.fleet["d0"].fail("decode", TransferTimeout("planted"))
    await serve(cluster, 1, Mode.PD)
    assert noted == []
