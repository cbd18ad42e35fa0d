"""Requests ahead (`Request.ahead`): of clients that have few requests in progress."""

from __future__ import annotations

import msgspec

from contract.engine import KVRole, Submit
from engine.scheduling.batch import SampledToken
from engine.scheduling.scheduler import OVERTAKEN_S, Scheduler, SchedulerConfig
from pdserve.core.clock import FakeClock
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams


def made(max_num_seqs: int, budget: int = 64) -> tuple[Scheduler, FakeClock]:
    clock = FakeClock()
    return Scheduler(SchedulerConfig(budget, max_num_seqs, 256, 4, 64), clock), clock


def asked(name: str, *, ahead: bool = False, tokens: int = 4, wants: int = 8, priority: int = 0) -> Submit:
    sampling = SamplingParams(max_tokens=wants, ignore_eos=True)
    request = Request(name, tuple(range(1, tokens + 1)), sampling, attempt_id=name, salt=name, priority=priority)
    return Submit(msgspec.structs.replace(request, ahead=ahead), KVRole.LOCAL)


def step(scheduler: Scheduler) -> list[str]:
    """Compute a step. Returns the requests in it, in order."""
    output = scheduler.schedule()
    scheduler.update(output, {seq.attempt_id: SampledToken(1) for seq in output.seqs if seq.sample}, 0.0)
    return [seq.attempt_id for seq in output.seqs]


def test_it_is_computed_before_others_that_wait() -> None:
    """Within its priority."""
    scheduler, _ = made(max_num_seqs=4, budget=4)
    for submit in (asked("a"), asked("b"), asked("c", ahead=True), asked("urgent", priority=-1)):
        scheduler.submit(submit)
    assert [step(scheduler)[-1] for _ in range(3)] == ["urgent", "c", "a"]


def test_it_takes_the_place_of_the_last_of_a_full_step() -> None:
    """Which keeps its blocks, and goes on when a place is free."""
    scheduler, _ = made(max_num_seqs=2)
    for submit in (asked("a", wants=3), asked("b", wants=3)):
        scheduler.submit(submit)
    assert step(scheduler) == ["a", "b"]
    scheduler.submit(asked("c", ahead=True, wants=2))
    scheduler.submit(asked("d"))
    assert [step(scheduler) for _ in range(4)] == [["c", "a"], ["c", "a"], ["b", "d"], ["b", "d"]]


def test_it_overtakes_only_what_came_lately() -> None:
    """So a client with many requests is served as well."""
    scheduler, clock = made(max_num_seqs=1)
    scheduler.submit(asked("early"))
    clock.advance(OVERTAKEN_S)
    scheduler.submit(asked("late"))
    scheduler.submit(asked("small", ahead=True))
    found = [step(scheduler)[0] for _ in range(24)]
    assert list(dict.fromkeys(found)) == ["early", "small", "late"]
