"""Deadlines of requests: of one wait, and of many waits with one timer."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import DeadlineExceeded
from router.deadline import Deadline
from tests.virtual_time import LoopClock


def deadline(seconds: float) -> Deadline:
    clock = LoopClock()
    return Deadline(clock.now() + seconds, clock)


async def given(value: str, after_s: float) -> str:
    await asyncio.sleep(after_s)
    return value


async def test_a_deadline_ends_a_wait_at_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    limit = deadline(1.0)
    assert await limit.bound(given("first", 0.4), "reading") == "first"
    assert await limit.bound(given("second", 0.4), "reading") == "second"
    with pytest.raises(DeadlineExceeded, match="it passed while reading"):
        await limit.bound(given("third", 0.4), "reading")
    assert loop.time() - begun_s == pytest.approx(1.0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task can go on, and be cancelled by others"


async def test_a_deadline_starts_no_wait_after_the_deadline() -> None:
    limit = deadline(1.0)
    await asyncio.sleep(1.5)
    begun: list[str] = []

    async def wait() -> None:
        begun.append("it has begun")

    with pytest.raises(DeadlineExceeded):
        await limit.bound(wait(), "reading")
    assert begun == []


@pytest.mark.parametrize("at_s", [0.05, 1.0])
async def test_a_cancellation_by_others_stays_one_even_at_the_deadline(at_s: float) -> None:
    task = asyncio.create_task(deadline(1.0).bound(given("never", 5.0), "reading"))
    asyncio.get_running_loop().call_later(at_s, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waits_of_several_tasks_end_together() -> None:
    limit = deadline(1.0)
    waits = [limit.bound(given("in time", 0.5), "a"), *(limit.bound(given("never", 5.0), name) for name in "bc")]
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert outcomes[0] == "in time"
    assert ["while b" in str(outcomes[1]), "while c" in str(outcomes[2])] == [True, True]
    assert all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes[1:])


async def test_a_result_that_comes_at_the_deadline_counts() -> None:
    """The task is told of both in the same round of the loop."""
    limit, result = deadline(1.0), asyncio.get_running_loop().create_future()

    async def stubborn() -> str:
        try:
            return str(await result)
        except asyncio.CancelledError:
            return "it came to an end"

    assert await limit.bound(stubborn(), "reading") == "it came to an end"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_closed_deadline_leaves_no_timer_and_a_moved_one_has_another() -> None:
    limit = deadline(1.0)
    assert await limit.bound(given("first", 0.5), "reading") == "first"
    limit.close()
    assert await given("undisturbed", 5.0) == "undisturbed"
    with pytest.raises(DeadlineExceeded):
        await limit.bound(given("too late", 0.0), "reading")
    clock = LoopClock()
    limit.move(clock.now() + 10.0, clock)
    assert await limit.bound(given("later", 5.0), "reading") == "later"
    with pytest.raises(DeadlineExceeded):
        await limit.bound(given("too late", 6.0), "reading")
    assert limit.left_s == 0.0
