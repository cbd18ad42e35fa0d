"""A worker that fails requests again and again pauses, then shows by one request whether it serves again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.core.errors import PdserveError, TransferTimeout, WorkerLost
from router import breaker as breakers
from router.breaker import MAX_PAUSE_S, Breaker, BreakerState
from tests.fake_worker import Point
from tests.router.conftest import Cluster, MakeCluster

LOST = WorkerLost("gone")


def fail(breaker: Breaker, error: PdserveError = LOST, *, may_open: bool = True) -> bool:
    """One request that fails."""
    number = breaker.begin()
    opens = breaker.failed(error, number, may_open=may_open)
    breaker.left(number)
    return opens


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(5):
        assert [fail(breaker), fail(breaker)] == [False, False]
        breaker.succeeded(breaker.begin())
    assert [fail(breaker), fail(breaker), fail(breaker, TransferTimeout("late"))] == [False, False, True]
    assert (breaker.state, breaker.allows_requests, breaker.pause_s) == (BreakerState.OPEN, False, 1.0)
    assert breaker.explanation == "3 requests in a row failed, so it pauses for 1 s; the last: late"
    assert breaker.total == {"WorkerLost": 12, "TransferTimeout": 1}


def test_requests_that_one_loss_ends_are_one_failure() -> None:
    breaker = Breaker()
    numbers = [breaker.begin() for _ in range(10)]
    assert [breaker.failed(LOST, number, may_open=True) for number in numbers] == [False] * 10
    assert (breaker.failures, breaker.total["WorkerLost"]) == (1, 10)
    breaker.succeeded(numbers[0])
    assert breaker.failures == 1, "it began before the loss"


def test_pauses_double_and_a_success_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakers, "TRIP_AFTER", 2)
    breaker = Breaker()
    fail(breaker)
    pauses, passed = [], []
    for _ in range(9):
        assert fail(breaker)
        pauses.append(breaker.pause_s)
        breaker.half_open()
        passed.append(breaker.allows_requests)
    assert passed == [True] * 9
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    number = breaker.begin()
    passed = [breaker.allows_requests]
    breaker.left(number)
    assert [*passed, breaker.allows_requests] == [False, True], "one probe at a time, and another if it was cancelled"
    assert "gets one request as a probe" in breaker.explanation
    number = breaker.begin()
    assert breaker.answered(number)
    assert (breaker.state, breaker.explanation, breaker.allows_requests) == (BreakerState.CLOSED, "", True)
    assert not breaker.answered(number)
    assert fail(breaker), "an answer alone does not end the row of failures"
    assert breaker.pause_s == MAX_PAUSE_S
    breaker.half_open()
    number = breaker.begin()
    assert breaker.answered(number)
    breaker.succeeded(number)
    assert (breaker.state, breaker.failures, breaker.explanation, breaker.pause_s) == (BreakerState.CLOSED, 0, "", 0.0)
    fail(breaker)
    assert fail(breaker)
    assert breaker.pause_s == 1.0


async def run(cluster: Cluster, **options: Any) -> str:
    """A request that is served in the end; the worker that decoded it."""
    return (await cluster.served(cluster.record(**options))).decode_worker


@pytest.fixture
async def tripped(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Of two decode workers, d0 has just failed a request, which is enough to make it pause."""
    monkeypatch.setattr(breakers, "TRIP_AFTER", 1)
    cluster = make_cluster(decode=2, policy="round_robin")
    cluster.fleet["d0"].fail("decode", TransferTimeout("late"))
    assert await run(cluster) == "d1"
    assert cluster.worker("d0").state == "failing"
    return cluster


@pytest.mark.parametrize("error", [WorkerLost("gone"), TransferTimeout("late")])
async def test_a_failing_worker_gets_nothing_but_a_probe_now_and_then(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, error: PdserveError
) -> None:
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 10.0)
    cluster = make_cluster(prefill=2, decode=2, policy="round_robin")
    bad, worker = cluster.fleet["d0"], cluster.worker("d0")
    bad.fail("decode", *[error] * 100)
    for _ in range(12):
        assert await run(cluster) == "d1"
        cluster.beat("d0")  # it lives, so it is suspect no longer
    assert len(bad.requests) == 3
    assert worker.state == "failing"
    assert worker.breaker.explanation.startswith("3 requests in a row failed, so it pauses for 10 s; the last: ")
    await asyncio.sleep(10.1)
    assert worker.state == "ready"
    for _ in range(4):
        assert await run(cluster) == "d1"
        cluster.beat("d0")
    assert len(bad.requests) == 4, "the probe"
    assert worker.state == "failing"
    await asyncio.sleep(10.1)
    assert worker.state == "failing", "twice as long"
    bad.failures.clear()
    await asyncio.sleep(10.0)
    assert {await run(cluster), await run(cluster)} == {"d0", "d1"}
    assert (worker.state, worker.breaker.explanation) == ("ready", "")


@pytest.mark.parametrize(("bad", "failing"), [("d0", "decode"), ("p0", "prefill")])
async def test_a_probe_counts_from_its_first_token(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, bad: str, failing: Point
) -> None:
    """A worker does not idle while a probe streams for minutes."""
    monkeypatch.setattr(breakers, "TRIP_AFTER", 1)
    cluster = make_cluster(prefill=2, decode=2, policy="round_robin")
    breaker = cluster.worker(bad).breaker
    cluster.fleet[bad].fail(failing, TransferTimeout("late"))
    while not breaker.failures:
        await run(cluster)
    await asyncio.sleep(1.1)
    for worker in cluster.fleet.values():
        worker.delay_s = {"decode_more": 60.0}
    probes = [asyncio.create_task(run(cluster, timeout_s=600.0)) for _ in range(2)]  # one of them on each worker
    await asyncio.sleep(1.0)
    assert breaker.state is BreakerState.CLOSED
    before = len(cluster.fleet[bad].requests)
    others = [asyncio.create_task(run(cluster, timeout_s=600.0)) for _ in range(4)]
    await asyncio.sleep(1.0)
    assert len(cluster.fleet[bad].requests) > before
    await asyncio.gather(*probes, *others)


async def test_the_last_worker_of_a_role_never_pauses(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_attempts=20)
    cluster.fleet["d0"].fail("decode", *[TransferTimeout("late")] * 8)
    assert await run(cluster, max_tokens=12) == "d0"


async def test_a_new_incarnation_inherits_the_breaker(tripped: Cluster) -> None:
    tripped.registry.add(tripped.fleet["d0"])
    assert tripped.worker("d0").state == "failing"
    await asyncio.sleep(1.1)
    assert tripped.worker("d0").state == "ready"


async def test_what_the_request_is_to_blame_for_counts_for_no_worker(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "TRIP_AFTER", 1)
    cluster = make_cluster(decode=2)
    cluster.fleet["d0"].hangs = cluster.fleet["d1"].hangs = {"decode"}
    tasks = [asyncio.create_task(cluster.served(cluster.record(timeout_s=0.5))) for _ in range(4)]
    await asyncio.sleep(0.1)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(worker.state == "ready" and not worker.breaker.total for worker in cluster.registry.workers)
