"""While a burst of requests arrives, others' work is held, and no longer than that."""

from __future__ import annotations

import asyncio

import pytest

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
    arriving = asyncio.create_task(arrive(noted, 2000, 0.001))
    await burst(noted)
    assert await held_s(noted) == pytest.approx(arrivals.HOLD_S, abs=0.01)
    rest_s = asyncio.get_running_loop().time()
    assert await burst(noted) - rest_s >= 0.99 * arrivals.REST_S
    arriving.cancel()
    await noted.settled()


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_request_placed_in_a_burst_waits_or_gives_its_place_back(
    make_cluster: MakeCluster, cancels: bool
) -> None:
    cluster = make_cluster()
    for _ in range(arrivals.BURST + 1):
        cluster.router.arrived()
        compute(0.002)
        await asyncio.sleep(0)
    task = asyncio.create_task(cluster.tokens(cluster.request()))
    await asyncio.sleep(arrivals.QUIET_S / 2)
    assert cluster.registry.get("p0").outstanding_requests == 1  # type: ignore[union-attr]  # it is there
    assert cluster.fleet["p0"].works == []
    if cancels:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        assert len(await task) == 4
    cluster.check_idle()
