"""Placement among many workers: a part of them is looked at, and nothing that only all of them have is missed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from pdserve.core.clock import FakeClock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded
from pdserve.core.request import Mode
from pdserve.core.worker import Role, WorkerLoad
from router.fair_queue import Waiting
from router.registry import SAMPLE, Assignment, WorkerRegistry
from router.view import Needs, WaitMode
from router.waiting_line import COMPARE_ALL_S, WaitingLine
from tests.fake_worker import FakeWorker, fake_info, fake_links

EACH = 5 * SAMPLE
"""Workers of each role."""


def registry_of(policy: str = "kv_aware", each: int = EACH, **settings: int) -> WorkerRegistry:
    config = RouterConfig(policy=policy, heartbeat_timeout_s=8e4, **settings)
    registry = WorkerRegistry(FakeClock(100.0), config)
    decoders = [f"d{n}" for n in range(each)]
    for worker_id in (*(f"p{n}" for n in range(each)), *decoders):
        role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
        worker = FakeWorker(fake_info(worker_id, role), {})
        links = fake_links(*decoders) if role is Role.PREFILL else {}
        registry.add(worker, WorkerLoad(free_blocks=worker.info.num_blocks), links)
    return registry


async def placed(registry: WorkerRegistry, needs: Needs) -> Assignment:
    """Where a line gives the request to workers at once."""
    line = WaitingLine(registry, RouterConfig(), FakeClock(100.0))
    return await line.wait(Waiting(needs.ticket, needs))


def needs_of(ticket: int, mode: WaitMode = Mode.PD, session: str = "") -> Needs:
    return Needs(mode, 64, 8, ticket=ticket, session=session)


@pytest.mark.parametrize("mode", [Mode.PD, Mode.COLOCATED])
async def test_requests_are_spread_over_all(mode: WaitMode) -> None:
    registry = registry_of()
    counts: Counter[str] = Counter()
    for ticket in range(4 * EACH):
        share = (await placed(registry, needs_of(ticket, mode))).prefill
        counts[share.worker.worker_id] += 1
    workers = EACH if mode is Mode.PD else 2 * EACH
    assert len(counts) > 0.95 * workers
    assert max(counts.values()) <= 2 * 4 * EACH / workers + 2, "with random choices some would have far more"


async def test_each_sees_a_part_and_not_the_same() -> None:
    registry = registry_of()
    seen: set[str] = set()
    for ticket in range(100):
        part = registry.sample(needs_of(ticket))
        assert part is not None
        assert [sum(w.role is role for w in part.workers) for role in Role] == [SAMPLE, SAMPLE]
        assert len({w.worker_id for w in part.workers}) == 2 * SAMPLE
        seen |= {w.worker_id for w in part.workers}
    assert len(seen) == 2 * EACH


async def test_the_only_one_that_is_free_is_found() -> None:
    registry = registry_of()
    for worker in registry.workers:
        if worker.worker_id not in ("p77", "d33"):
            registry.retire(worker.worker_id)
    for ticket in range(20):
        assignment = await placed(registry, needs_of(ticket))
        assert assignment.decode is not None
        found = assignment.prefill.worker.worker_id, assignment.decode.worker.worker_id
        assert found == ("p77", "d33")
        assignment.end()


async def test_what_a_request_has_a_reason_for_is_seen() -> None:
    registry = registry_of()
    for ticket in range(20):
        cached = {"p5": 48, "d9": 16}
        for needs in (
            Needs(Mode.PD, 64, 8, ticket=ticket, cached=cached),
            Needs(Mode.PD, 64, 8, ticket=ticket, prefer="p5"),
        ):
            assignment = await placed(registry, needs)
            assert assignment.prefill.worker.worker_id == "p5"
            assignment.end()


async def test_a_request_behind_others_is_compared_with_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of()
    line = WaitingLine(registry, RouterConfig(), FakeClock(100.0))
    taken = [registry.begin(worker.worker_id, 10**6, 10**6) for worker in registry.workers]
    first = asyncio.create_task(line.wait(Waiting(1, needs_of(1))))
    await asyncio.sleep(0)
    assert line.length == 1
    with monkeypatch.context() as patch:
        patch.setattr(registry, "view", lambda: pytest.fail("all workers are compared"))
        second = asyncio.create_task(line.wait(Waiting(2, needs_of(2))))
        await asyncio.sleep(0)
    assert line.length == 2
    with pytest.raises(CapacityExceeded):  # what no worker can hold is refused at once
        await line.wait(Waiting(3, Needs(Mode.PD, 10**6, 8, ticket=3)))
    for share in taken:
        share.end()
    for each in (first, second):
        await each


async def test_one_that_waits_is_compared_with_those_that_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(prefill_backlog_tokens=64)
    line = WaitingLine(registry, RouterConfig(), FakeClock(100.0))
    taken = {worker.worker_id: registry.begin(worker.worker_id, 10**6, 10**6) for worker in registry.workers}
    tickets = range(20)
    requests = [asyncio.create_task(line.wait(Waiting(ticket, needs_of(ticket)))) for ticket in tickets]
    await asyncio.sleep(0)
    registry.heartbeat("d0", WorkerLoad(free_blocks=9))
    with monkeypatch.context() as patch:
        patch.setattr(registry, "view", lambda: pytest.fail("all workers are compared"))
        for ticket in tickets:
            registry.heartbeat(f"d{ticket}", WorkerLoad(free_blocks=1000))
            taken[f"p{ticket}"].end()
            assert line.length == len(tickets) - 1 - ticket
    given = [(await request).prefill.worker.worker_id for request in requests]
    assert given == [f"p{ticket}" for ticket in tickets]


async def test_one_that_waits_is_compared_with_all_again_before_long() -> None:
    registry, clock = registry_of(), FakeClock(100.0)
    line = WaitingLine(registry, RouterConfig(), clock)
    for worker in registry.workers:
        registry.begin(worker.worker_id, 10**6, 10**6)
    first = asyncio.create_task(line.wait(Waiting(1, needs_of(1))))
    await asyncio.sleep(0)
    free = next(w for w in registry.workers if w.role is Role.PREFILL and w.worker_id not in drawn(registry, 1))
    free.outstanding_tokens = free.prompt_tokens = 0  # without a change that the line is told of
    registry.heartbeat("d0", WorkerLoad(free_blocks=9))
    assert line.length == 0, "all are compared after the first change"
    assert (await first).prefill.worker is free
    (await first).prefill.worker.prompt_tokens = 10**6
    second = asyncio.create_task(line.wait(Waiting(2, needs_of(2))))
    await asyncio.sleep(0)
    registry.heartbeat("d0", WorkerLoad(free_blocks=9))
    free = next(w for w in registry.workers if w.role is Role.PREFILL and w.worker_id not in drawn(registry, 2))
    free.outstanding_tokens = free.prompt_tokens = 0
    registry.heartbeat("d0", WorkerLoad(free_blocks=9))
    assert line.length == 1
    clock.advance(2 * COMPARE_ALL_S)
    assert (await second).prefill.worker is free


async def test_changes_while_one_waits_add_no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of()
    line = WaitingLine(registry, RouterConfig(), FakeClock(100.0))
    part = drawn(registry, 1)
    for worker in registry.workers:
        registry.begin(worker.worker_id, 10**6, 10**6)
        if worker.worker_id in part:
            registry.retire(worker.worker_id)  # what is drawn says that no worker is ready
    first = asyncio.create_task(line.wait(Waiting(1, needs_of(1))))
    await asyncio.sleep(0)
    timers: list[float] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda after_s, call: timers.append(after_s))
    for _ in range(100):
        registry.heartbeat("d0", WorkerLoad(free_blocks=9))
    assert (line.length, len(timers)) == (1, 1)
    monkeypatch.undo()
    first.cancel()


async def test_without_a_pair_among_those_that_are_drawn_others_are_found() -> None:
    registry = registry_of()
    for worker_id in drawn(registry, 1):
        if worker_id.startswith("p"):
            registry.retire(worker_id)
    assignment = await placed(registry, needs_of(1, Mode.AUTO))
    assert assignment.decode is not None, assignment.reason


def drawn(registry: WorkerRegistry, ticket: int) -> set[str]:
    part = registry.sample(needs_of(ticket))
    assert part is not None
    return {each.worker_id for each in part.workers}


async def test_lost_workers_and_new_roles_are_known() -> None:
    registry = registry_of()
    for number in range(EACH - SAMPLE):
        registry.lost(f"p{number}")
    worker = registry.get("d0")
    assert worker is not None
    registry.heartbeat("d0", WorkerLoad(free_blocks=9), replace(worker.info, role=Role.PREFILL), fake_links("d1"))
    part = registry.sample(needs_of(1))
    assert part is not None
    prefill = {each.worker_id for each in part.workers if each.role is Role.PREFILL}
    assert not prefill & {f"p{number}" for number in range(EACH - SAMPLE)}
    seen = [registry.sample(needs_of(ticket)) for ticket in range(40)]
    assert any(each.worker_id == "d0" and each.role is Role.PREFILL for part in seen if part for each in part.workers)


@pytest.mark.parametrize("policy", ["session", "round_robin", "nearest_link"])
async def test_policies_that_compare_all_see_all(policy: str) -> None:
    registry = registry_of(policy)
    assert registry.sample(needs_of(1)) is None
    if policy == "session":
        first = {
            (await placed(registry, needs_of(ticket, session="s"))).prefill.worker.worker_id for ticket in range(9)
        }
        assert len(first) == 1


async def test_few_workers_are_all_seen() -> None:
    assert registry_of(each=SAMPLE).sample(needs_of(1)) is None
