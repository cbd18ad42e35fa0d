"""What waits for a worker and how long: bounds of the queue, priorities, turns of clients."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import CapacityExceeded, TransferTimeout
from pdserve.core.request import AGED_S, Mode
from router.fair_queue import AGED_EVERY
from router.placement import Wait, place
from router.session import RoutedToken
from router.view import Needs
from tests.router.conftest import Cluster, MakeCluster

SERVICE_S = 0.1


def start(cluster: Cluster, count: int, *, first: int = 0, **options: object) -> list[asyncio.Task[Any]]:
    names = [f"{options.get('client', 'r')}-{first + i}" for i in range(count)]
    records = [cluster.record(name=name, timeout_s=1e4, **options) for name in names]  # type: ignore[arg-type]
    return [asyncio.create_task(cluster.served(record)) for record in records]


async def full(
    make_cluster: MakeCluster, count: int, *, users: str = "", client: str = "", **config: int
) -> tuple[Cluster, list[asyncio.Task[Any]]]:
    """A router on whose only worker one of ``count`` requests runs for ever, and all others wait: those of one client,
    or one each of ``users`` of the same host."""
    cluster = make_cluster(prefill_backlog_tokens=1, **config)
    cluster.fleet["p0"].hangs = {"prefill"}
    tasks = [task for user in users for task in start(cluster, 1, client=user, holder="host")]
    tasks = tasks or start(cluster, count, client=client)
    await cluster.until(lambda: cluster.router.queued == count - 1)
    return cluster, tasks


def turned_away(cluster: Cluster, why: str, client: str, being_read: int = 0) -> None:
    """Before it is read, while so many of its requests are being read."""
    with pytest.raises(CapacityExceeded, match=why):
        cluster.router.arrived(client, Counter({client: being_read}))


async def refused(cluster: Cluster, why: str, **options: Any) -> None:
    """Once it has been read."""
    with pytest.raises(CapacityExceeded, match=why):
        await cluster.served(cluster.record(**options))


async def test_no_priority_starves_and_the_earliest_keeps_its_share(make_cluster: MakeCluster) -> None:
    """Requests of an early priority arrive as fast as they are served; a hundred of a later one wait as well."""
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue=2_000)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    early = start(cluster, 800, client="early", priority=-5)
    late = start(cluster, 100, client="late")
    await asyncio.sleep(AGED_S - SERVICE_S)
    assert not any(task.done() for task in late)
    await asyncio.sleep(40.0)
    served = [request for _, request in cluster.fleet["p0"].requests]
    names = [request.request_id.partition("-")[0] for request in served]
    since = names.index("late")
    share = 1 - names[since:].count("early") / len(names[since:])
    assert 1 / AGED_EVERY - 0.01 < share <= 1 / AGED_EVERY + 0.01
    # Workers have a queue too: there, one that has aged has the priority of those that it was served with.
    assert {request.priority for request in served} == {-5}
    for task in early:
        task.cancel()
    await asyncio.gather(*late)
    await cluster.finish(*early)


async def test_a_paused_reader_waits_for_its_turn_again_and_is_charged(make_cluster: MakeCluster) -> None:
    """A client that leaves its outputs unread has its context prefilled again each time that it goes on."""
    cluster = make_cluster(prefill_backlog_tokens=1, max_unread_tokens=4)
    record = cluster.record(name="paused", max_tokens=30, client="slow", timeout_s=1e4)
    generation = cluster.router.generate(record)
    tokens = aiter(generation)
    await anext(tokens)
    await cluster.until(lambda: cluster.aborted("d0") == ["paused"])
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    others = start(cluster, 40, client="a") + start(cluster, 40, client="b")
    await asyncio.sleep(0.5 * SERVICE_S)
    got, pauses = [6], 1
    for _ in range(20):
        got.append((await anext(tokens)).token_id)
        await asyncio.sleep(0.001)  # the worker is ahead of its client
        pauses = len(cluster.aborted("d0"))
    assert got == list(range(6, 27))
    assert pauses > 2
    assert record.recomputed_tokens >= (pauses - 1) * (5 + 5)
    names = [request.request_id for _, request in cluster.fleet["p0"].requests]
    turns = [number for number, name in enumerate(names) if name == "paused"]
    for since, until in itertools.pairwise(turns[1:]):
        between = {name[0] for name in names[since + 1 : until]}
        assert between == {"a", "b"}, names
    await generation.aclose()
    await asyncio.gather(*others)


async def test_a_client_has_its_share_of_a_full_queue(make_cluster: MakeCluster) -> None:
    """The one with the most gives way, by its newest requests, until the shares are equal."""
    cluster, flood = await full(make_cluster, 13, client="flood", max_queue=12)
    turned_away(cluster, "^queue: 12 requests are waiting", "flood")
    turned_away(cluster, "^queue: 12 requests are waiting", "flood", 12)
    cluster.router.arrived("one", Counter())
    cluster.router.arrived("one", Counter({"flood": 12}))
    one = start(cluster, 6, client="one")
    await cluster.until(lambda: sum(task.done() for task in flood) == 6)
    assert [task.done() for task in flood] == [False] * 7 + [True] * 6, "the newest"
    error = flood[-1].exception()
    assert isinstance(error, CapacityExceeded)
    assert str(error).startswith(
        "queue: it is full (router.max_queue, router.max_queue_tokens), and a client with fewer"
    )
    assert error.retry_after_s is not None
    assert cluster.router.queued == 12
    await refused(cluster, "^queue: 12 requests are waiting", client="one")
    third = start(cluster, 4, client="third")
    await cluster.until(lambda: cluster.router.queued == 12 and sum(task.done() for task in (*flood, *one)) == 10)
    assert (sum(task.done() for task in flood), sum(task.done() for task in one)) == (8, 2)
    assert not any(task.done() for task in third)
    await cluster.finish(*flood, *one, *third)


async def test_a_request_is_not_refused_for_one_that_is_refused_as_well(make_cluster: MakeCluster) -> None:
    cluster, flood = await full(make_cluster, 5, client="flood", max_queue=4, max_queue_tokens=40)  # each of 9 tokens
    await refused(cluster, "have 36 tokens", client="one", prompt=tuple(range(40)))
    assert not any(task.done() for task in flood)
    await cluster.finish(*flood)


async def test_users_of_one_host_have_its_share_of_a_full_queue(make_cluster: MakeCluster) -> None:
    """They take turns, but whoever makes up users has no more of the queue."""
    cluster, users = await full(make_cluster, 7, users="abcdefg", max_queue=6)
    turned_away(cluster, "^queue: 6 requests are waiting", "host")
    await refused(cluster, "^queue: 6 requests are waiting", client="h", holder="host")
    one = start(cluster, 1, client="one")
    await cluster.until(lambda: sum(task.done() for task in users) == 1)
    assert not one[0].done()
    await cluster.finish(*users, *one)


async def test_paused_requests_that_wait_again_take_their_clients_share(make_cluster: MakeCluster) -> None:
    """They are not refused, and keep nobody out."""
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue=4, max_unread_tokens=4)
    generations = [
        cluster.router.generate(cluster.record(name=f"slow-{number}", max_tokens=30, client="slow", timeout_s=1e4))
        for number in range(6)
    ]
    readers = [aiter(generation) for generation in generations]
    for reader in readers:
        await anext(reader)
    await cluster.until(lambda: len(cluster.aborted("d0")) == 6)
    cluster.fleet["p0"].hangs = {"prefill"}
    (busy,) = start(cluster, 1, client="busy")
    await asyncio.sleep(0.1)

    async def read_on(reader: AsyncIterator[RoutedToken]) -> None:
        async for _ in reader:
            pass

    reading: list[asyncio.Task[Any]] = [asyncio.create_task(read_on(reader)) for reader in readers]
    await cluster.until(lambda: cluster.router.queued == 6)
    one = start(cluster, 2, client="one")
    await cluster.until(lambda: cluster.router.queued == 8)
    turned_away(cluster, "^queue: 4 requests are waiting", "slow")
    assert not any(task.done() for task in (*reading, *one))
    await cluster.finish(busy, *reading, *one)


async def test_a_client_has_its_share_of_the_tokens_of_a_full_queue(make_cluster: MakeCluster) -> None:
    cluster, flood = await full(make_cluster, 14, client="flood", max_queue_tokens=120)  # each of 5 + 4 tokens
    await refused(cluster, "have 117 tokens", client="flood")
    one = start(cluster, 1, client="one", prompt=tuple(range(40)))  # of 44
    await cluster.until(lambda: sum(task.done() for task in flood) == 5)
    assert not one[0].done()
    await refused(cluster, "have 116 tokens", client="one", prompt=tuple(range(40)))
    assert [task.done() for task in flood] == [False] * 9 + [True] * 5
    await cluster.finish(*flood, *one)


async def test_a_retry_goes_before_all_others_of_its_priority(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    await asyncio.gather(*start(cluster, 3, client="a"), *start(cluster, 3, client="b"))
    names = [request.request_id for _, request in cluster.fleet["p0"].requests]
    assert names == ["a-0", "a-1", "a-0", "b-0", "a-2", "b-1", "b-2"]


async def test_the_queue_is_bounded_by_tokens_too(make_cluster: MakeCluster) -> None:
    cluster, tasks = await full(make_cluster, 3, max_queue_tokens=20)  # each of 5 + 4 tokens
    cluster.router.arrived("", Counter())  # of how many tokens is not known yet
    await refused(cluster, r"have 18 tokens, and at most 20 may wait \(router.max_queue_tokens\)")
    tasks += start(cluster, 1, prompt=(1,), max_tokens=1, first=7)
    await cluster.until(lambda: cluster.router.queued == 3)
    turned_away(cluster, "have 20 tokens", "")
    await cluster.finish(*tasks)
    # A request that is larger than the bound waits if it is the only one.
    tasks = start(cluster, 1) + start(cluster, 1, prompt=tuple(range(40)), first=1)
    await cluster.until(lambda: cluster.router.queued == 1)
    await cluster.finish(*tasks)


async def test_the_refusal_says_when_to_come_back(make_cluster: MakeCluster) -> None:
    """By the rate at which tokens have left the queue."""
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue_tokens=900)
    cluster.fleet["p0"].delay_s = {"prefill": SERVICE_S}
    tasks = start(cluster, 100)
    await asyncio.sleep(20.5 * SERVICE_S)
    tasks += start(cluster, 40, first=100)
    await asyncio.sleep(0.001)
    with pytest.raises(CapacityExceeded) as caught:
        await cluster.served(cluster.record())
    # A quarter of 100 requests, of which 10 leave in a second.
    assert caught.value.retry_after_s == pytest.approx(2.5, rel=0.15)
    await cluster.finish(*tasks)


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
    await refused(cluster, "3 requests are waiting", mode=mode)
    decision = place(Needs(mode, 5, 4), cluster.registry.view())
    assert isinstance(decision, Wait)
    assert decision.reason.endswith("d0 has 5 requests, the fewest of 1 (engine.max_num_seqs: 4)")
    tasks[0].cancel()
    await cluster.until(lambda: (cluster.router.running, cluster.router.queued) == (5, 2))
    await cluster.finish(*tasks)
