"""What waits for a worker and how long: bounds of the queue, priorities, turns of clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.core.errors import CapacityExceeded, TransferTimeout
from pdserve.core.request import Mode
from router.needs import Needs
from router.placement import Wait, place

if TYPE_CHECKING:
    from tests.router.conftest import Cluster, MakeCluster

SERVICE_S = 0.1


async def finish(tasks: list[asyncio.Task[list[int]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def start(cluster: Cluster, count: int, *, first: int = 0, **options: object) -> list[asyncio.Task[list[int]]]:
    names = [f"{options.get('client', 'r')}-{first + i}" for i in range(count)]
    records = [cluster.record(name=name, timeout_s=1e4, **options) for name in names]  # type: ignore[arg-type]
    return [asyncio.create_task(cluster.tokens(record)) for record in records]


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED, Mode.AUTO])
async def test_a_client_with_a_thousand_requests_does_not_delay_one_with_one(
    make_cluster: MakeCluster, mode: Mode
) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue=2_000)
    for worker in cluster.fleet.values():
        worker.delay_s = {"prefill": SERVICE_S, "run": SERVICE_S}
    many = start(cluster, 1_000, client="many", mode=mode)
    await asyncio.sleep(10.5 * SERVICE_S)
    begin_s = cluster.clock.now()
    (one,) = start(cluster, 1, client="one", mode=Mode.PD)
    assert await one == [6, 7, 8, 9]
    # It waits for the request that runs, and at most one that was next.
    assert cluster.clock.now() - begin_s < 3.1 * SERVICE_S
    assert sum(task.done() for task in many) < 50
    await finish(many)
    cluster.check_idle()


async def test_priorities_go_before_turns(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    tasks = start(cluster, 3, client="a") + start(cluster, 2, client="b", priority=1)
    tasks += start(cluster, 1, client="a", first=9, priority=-1)
    await asyncio.gather(*tasks)
    names = [request.request_id for _, request in cluster.fleet["p0"].requests]
    assert names == ["a-0", "a-9", "a-1", "a-2", "b-0", "b-1"]
    assert [request.priority for _, request in cluster.fleet["d0"].requests] == [0, -1, 0, 0, 1, 1]
    cluster.check_idle()


async def test_a_retry_goes_before_all_others_of_its_priority(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    await asyncio.gather(*start(cluster, 3, client="a"), *start(cluster, 3, client="b"))
    names = [request.request_id for _, request in cluster.fleet["p0"].requests]
    assert names == ["a-0", "a-1", "a-0", "b-0", "a-2", "b-1", "b-2"]
    cluster.check_idle()


async def test_the_queue_is_bounded_by_tokens_too(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue_tokens=20)
    cluster.fleet["p0"].hangs = {"prefill"}
    tasks = start(cluster, 3)  # of 5 + 4 tokens; one runs
    await cluster.until(lambda: cluster.router.queued == 2)
    cluster.router.arrived(0)  # of how many tokens is not known yet
    with pytest.raises(CapacityExceeded, match=r"have 18 tokens, and at most 20 may wait \(router.max_queue_tokens\)"):
        await cluster.tokens(cluster.record())
    tasks += start(cluster, 1, prompt=(1,), max_tokens=1, first=7)
    await cluster.until(lambda: cluster.router.queued == 3)
    with pytest.raises(CapacityExceeded, match="have 20 tokens"):
        cluster.router.arrived(0)
    await finish(tasks)
    # A request that is larger than the bound waits if it is the only one.
    tasks = start(cluster, 1) + start(cluster, 1, prompt=tuple(range(40)), first=1)
    await cluster.until(lambda: cluster.router.queued == 1)
    await finish(tasks)
    cluster.check_idle()


async def test_the_refusal_says_when_to_come_back(make_cluster: MakeCluster) -> None:
    """By the rate at which tokens have left the queue."""
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue_tokens=900)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    tasks = start(cluster, 100)
    await asyncio.sleep(20.5 * SERVICE_S)
    tasks += start(cluster, 40, first=100)
    await asyncio.sleep(0.001)
    with pytest.raises(CapacityExceeded) as caught:
        await cluster.tokens(cluster.record())
    # A quarter of 100 requests, of which 10 leave in a second.
    assert caught.value.retry_after_s == pytest.approx(2.5, rel=0.15)
    await finish(tasks)
    cluster.check_idle()


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED])
async def test_a_worker_gets_no_more_requests_than_it_computes_at_a_time(make_cluster: MakeCluster, mode: Mode) -> None:
    """And a quarter more, to replace those that end. The others wait here, where the queue is bounded."""
    cluster = make_cluster(max_queue=3)
    for worker in cluster.registry.workers:
        worker.info = replace(worker.info, max_num_seqs=4)
    cluster.registry.lost("p0" if mode is Mode.COLOCATED else "none")
    cluster.fleet["d0"].hangs = {"decode", "run"}
    tasks = start(cluster, 8, mode=mode)
    await cluster.until(lambda: (cluster.router.running, cluster.router.queued) == (5, 3))
    with pytest.raises(CapacityExceeded, match="3 requests are waiting"):
        await cluster.tokens(cluster.record(mode=mode))
    decision = place(Needs(mode, 5, 4), cluster.registry.view())
    assert isinstance(decision, Wait)
    assert decision.reason.endswith("d0 has 5 requests, the fewest of 1 (engine.max_num_seqs: 4)")
    tasks[0].cancel()
    await cluster.until(lambda: (cluster.router.running, cluster.router.queued) == (5, 2))
    await finish(tasks)
    cluster.check_idle()
