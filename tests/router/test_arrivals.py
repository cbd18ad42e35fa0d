"""While a burst of requests arrives, others' work is held, and no longer than that."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pdserve.core.errors import CapacityExceeded
from router import arrivals
from router.arrivals import Arrivals
from tests.router.conftest import MakeCluster
from tests.virtual_time import VirtualTimeLoop


def compute(seconds: float) -> None:
    """Keep the event loop busy."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.compute(seconds)


async def arrive(noted: Arrivals, count: int, round_s: float) -> None:
    """Requests that a loop accepts one by one, in rounds that take ``round_s``."""
    for _ in range(count):
        noted.note()
        compute(round_s)
        await asyncio.sleep(0)


def is_burst(noted: Arrivals) -> bool:
    """As it is now."""
    return noted.is_burst


async def burst(noted: Arrivals) -> float:
    """Wait for one; returns the time of the loop."""
    while not noted.is_burst:  # noqa: ASYNC110 - what waits for it waits for its end
        await asyncio.sleep(0)
    return asyncio.get_running_loop().time()


async def held_s(noted: Arrivals) -> float:
    """Seconds until others' work may go on."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    await noted.settled()
    return loop.time() - begin_s


async def test_slow_accepting_is_a_burst_until_nothing_arrives() -> None:
    noted = Arrivals()
    await arrive(noted, arrivals.BURST, 0.002)
    assert not is_burst(noted)
    await arrive(noted, 1, 0.002)
    assert is_burst(noted)
    assert arrivals.QUIET_S - 0.003 <= await held_s(noted) <= arrivals.QUIET_S + 0.003
    assert not is_burst(noted)
    assert await held_s(noted) == 0


async def test_an_idle_gateway_that_accepts_quickly_holds_nothing() -> None:
    noted = Arrivals()
    await arrive(noted, 1000, 0.0001)
    assert not is_burst(noted)


async def test_requests_that_come_one_after_the_other_hold_nothing() -> None:
    noted = Arrivals()
    for _ in range(100):
        await arrive(noted, 1, 0.002)
        await asyncio.sleep(0.001)
        for _ in range(arrivals.ROUNDS):
            await asyncio.sleep(0)
    assert not is_burst(noted)


async def test_an_endless_burst_holds_for_a_while_then_others_have_a_turn() -> None:
    noted = Arrivals()
    arriving = asyncio.create_task(arrive(noted, 10_000, 0.001))
    await burst(noted)
    assert await held_s(noted) == pytest.approx(arrivals.HOLD_S, abs=0.01)
    rest_s = asyncio.get_running_loop().time()
    assert await burst(noted) - rest_s >= 0.99 * arrivals.REST_SHARE * arrivals.HOLD_S
    arriving.cancel()
    await noted.settled()


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_request_placed_in_a_burst_waits_or_gives_its_place_back(
    make_cluster: MakeCluster, cancels: bool
) -> None:
    cluster = make_cluster()
    for _ in range(arrivals.BURST + 1):
        cluster.router.was_read()
        compute(0.002)
        await asyncio.sleep(0)
    task = asyncio.create_task(cluster.served(cluster.record()))
    await asyncio.sleep(arrivals.QUIET_S / 2)
    assert cluster.worker("p0").outstanding_requests == 1
    assert cluster.fleet["p0"].requests == cluster.fleet["d0"].requests == []
    if not cancels:
        await task
    await cluster.finish(task)


async def test_a_steady_flow_holds_others_for_a_third_of_the_time_at_most() -> None:
    noted = Arrivals()
    loop = asyncio.get_running_loop()
    begin_s, held = loop.time(), 0.0
    arriving = asyncio.create_task(arrive(noted, 30_000, 0.001))
    while not arriving.done():
        await asyncio.sleep(0)
        held += await held_s(noted)
    assert 0.2 < held / (loop.time() - begin_s) < 0.36


@pytest.mark.parametrize("max_queue", [2, 1024])
async def test_a_full_line_and_prompts_that_wait_to_be_read_refuse_and_bursts_are_still_taken_in(
    make_cluster: MakeCluster, max_queue: int
) -> None:
    cluster = make_cluster(prefill_backlog_tokens=1, max_queue=max_queue)
    cluster.fleet["p0"].hangs = {"prefill"}
    noted = cluster.router._arrivals
    with pytest.raises(CapacityExceeded, match=f"{max_queue:,} requests are waiting"):
        cluster.router.arrived("", Counter({"": max_queue}))
    waiting = [cluster.record(name=f"r{index}") for index in range(max_queue + 1)]
    tasks = [asyncio.create_task(cluster.served(record)) for record in waiting]
    await asyncio.sleep(1.0)
    assert cluster.router.queued == max_queue
    for _ in range(arrivals.BURST + 1):
        with pytest.raises(CapacityExceeded):
            cluster.router.arrived("", Counter())
        compute(0.002)
        await asyncio.sleep(0)
    assert noted.is_burst
    await noted.settled()
    await asyncio.sleep(arrivals.HOLD_S * (1 + arrivals.REST_SHARE))
    for _ in range(arrivals.BURST + 1):  # of a client that waits beside others
        with pytest.raises(CapacityExceeded):
            cluster.router.arrived("another", Counter(another=max_queue, others=max_queue))
        compute(0.002)
        await asyncio.sleep(0)
    assert [noted.is_burst] == [False]
    await cluster.finish(*tasks)
