"""A request that cannot meet its deadline by the cost model is refused at once; one that can is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.core.errors import DeadlineExceeded
from pdserve.core.request import Mode, Request, RequestStatus
from router.cost_model import MIN_SAMPLES
from router.view import Needs
from router.waiting_line import CAUTION, earliest_finish_s
from tests.router.conftest import Cluster, MakeCluster
from tests.router.test_auto_mode import costs, line, worker
from tests.router.test_placement import view


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
