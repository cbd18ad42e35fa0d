"""A request that cannot meet its deadline by the cost model is refused at once; one that can is not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.core.errors import DeadlineExceeded
from pdserve.core.request import Mode, RequestStatus
from router.cost_model import MIN_SAMPLES, Costs
from router.view import Needs
from router.waiting_line import CAUTION, earliest_finish_s
from tests.router.test_auto_mode import costs, line, worker
from tests.router.test_placement import view

if TYPE_CHECKING:
    from pdserve.core.request import Request
    from tests.router.conftest import Cluster, MakeCluster


def cluster_view(**changes: Any) -> Any:
    return msgspec.structs.replace(view(worker("p0"), worker("d0")), costs=costs(**changes))


def needs(mode: Any = Mode.PD, tokens: int = 1000, **changes: Any) -> Needs:
    return Needs(mode, tokens, 50, **changes)


def test_it_is_half_of_what_the_fastest_worker_takes() -> None:
    own_s = 2e-3 + 1e-4 * 1000
    assert earliest_finish_s(needs(), cluster_view()) == pytest.approx(CAUTION * own_s)
    slow = line(1.0, 1e-4, 0.0, 0.0)
    lines = {"prefill cpu": slow, "decode cpu": line(2e-3, 1e-4, 1e-4, 0.0)}
    assert earliest_finish_s(needs(), cluster_view(prefill=lines)) == pytest.approx(CAUTION * 1.1)
    assert earliest_finish_s(needs(Mode.AUTO), cluster_view(prefill=lines)) == pytest.approx(CAUTION * own_s)


def test_waiting_prompts_are_computed_by_all_workers_together() -> None:
    alone = earliest_finish_s(needs(), cluster_view())
    assert earliest_finish_s(needs(), cluster_view(), 2000) - alone == pytest.approx(CAUTION * 0.2)
    both = earliest_finish_s(needs(Mode.COLOCATED), cluster_view(), 2000)
    assert both - alone == pytest.approx(CAUTION * 0.1)


def test_cached_prompts_cost_less() -> None:
    """This request may have as much cached as the luckiest one, the waiting ones as the mean."""
    found = cluster_view(uncached=0.5, least_uncached=0.1)
    assert earliest_finish_s(needs(), found, 2000) == pytest.approx(CAUTION * (2e-3 + 1e-4 * 100 + 0.1))


def test_only_outputs_that_are_sure_count() -> None:
    alone = earliest_finish_s(needs(), cluster_view())
    some = earliest_finish_s(needs(min_output_tokens=50), cluster_view())
    assert some - alone == pytest.approx(CAUTION * 49 * 5.5e-3)


def test_without_measurements_of_every_worker_nothing_is_said() -> None:
    assert earliest_finish_s(needs(), cluster_view(prefill={})) == 0.0
    assert earliest_finish_s(needs(Mode.AUTO), cluster_view(prefill={"prefill cpu": line(9.0, 0, 0, 0)})) == 0.0
    assert earliest_finish_s(needs(min_output_tokens=50), cluster_view(decode={})) == pytest.approx(CAUTION * 0.102)
    unsure = {"prefill cpu": line(0.1, 0.0, 0.0, 0.0, deviation=1.0)}
    assert earliest_finish_s(needs(), cluster_view(prefill=unsure)) == 0.0


# --- in a router -----------------------------------------------------------------------------------------------------


async def taught(make_cluster: MakeCluster, **config: Any) -> Cluster:
    """A router that knows: prefill takes 0.1 s, a token 0.01 s."""
    cluster = make_cluster(**config)
    cluster.fleet["p0"].delay_s = {"prefill": 0.1}
    cluster.fleet["d0"].delay_s = {"decode_step": 0.01, "decode_more": 0.01}
    for index in range(MIN_SAMPLES):
        await cluster.served(cluster.record(name=f"r{index}", max_tokens=8))
    cluster.registry.cost_model.refit()
    for worker_id in cluster.fleet:
        cluster.beat(worker_id)
    return cluster


async def test_a_request_that_is_sure_to_be_late_is_refused_at_once(make_cluster: MakeCluster) -> None:
    cluster = await taught(make_cluster)
    before = len(cluster.fleet["p0"].requests)
    began_s = cluster.clock.now()
    record = cluster.record(timeout_s=0.04)
    with pytest.raises(DeadlineExceeded, match=r"^deadline: 0\.04 s are left, and by the costs .* at least 0\.05 s; "):
        await cluster.served(record)
    assert cluster.clock.now() == began_s
    assert record.status is RequestStatus.FAILED
    assert len(cluster.fleet["p0"].requests) == before
    await cluster.served(cluster.record(timeout_s=0.2))


def ignoring_eos(request: Request) -> Request:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, ignore_eos=True))


async def test_outputs_that_are_sure_are_part_of_it(make_cluster: MakeCluster) -> None:
    cluster = await taught(make_cluster)
    record = cluster.record(max_tokens=100, timeout_s=0.3)
    record.request = ignoring_eos(record.request)
    with pytest.raises(DeadlineExceeded, match=r"at least 0\.5\d* s"):
        await cluster.served(record)


async def test_none_is_refused_that_would_have_been_served(make_cluster: MakeCluster) -> None:
    """The same requests to a router that knows its costs and to one that does not: the first refuses some at once, and
    serves at least as many."""

    async def run(cluster: Cluster) -> tuple[list[bool], list[float]]:
        refused_after_s: list[float] = []

        async def one(index: int) -> bool:
            await asyncio.sleep(0.03 * index)
            began_s = cluster.clock.now()
            record = cluster.record(name=f"q{index}", timeout_s=0.5)
            try:
                await cluster.served(record)
            except DeadlineExceeded:
                refused_after_s.append(cluster.clock.now() - began_s)
                return False
            return True

        async def beats() -> None:
            while True:
                await asyncio.sleep(0.5)
                for worker_id in cluster.fleet:
                    cluster.beat(worker_id)

        beating = asyncio.create_task(beats())
        try:
            served = await asyncio.gather(*(one(index) for index in range(60)))
        finally:
            beating.cancel()
        cluster.check_idle()
        return list(served), refused_after_s

    def cluster(known: Costs) -> Cluster:
        # A fake worker computes any number of prompts at once, so the backlog admits one at a time.
        made = make_cluster(prefill_backlog_tokens=1)
        made.fleet["p0"].delay_s = {"prefill": 0.1}
        made.fleet["d0"].delay_s = {"decode_step": 0.01, "decode_more": 0.01}
        made.registry.cost_model._costs = known
        made.registry.cost_model.refit = lambda: known  # type: ignore[method-assign]
        return made

    knowing = cluster(costs(prefill={"prefill cpu": line(0.0, 0.1 / 5, 0.1 / 5, 0.0)}))
    served, refused_after_s = await run(knowing)
    ignorant = cluster(Costs())
    without, late_after_s = await run(ignorant)
    assert sum(served) >= sum(without)
    assert sum(1 for seconds in refused_after_s if seconds == 0.0) > 10
    assert all(seconds >= 0.49 for seconds in late_after_s)
