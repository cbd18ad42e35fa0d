"""The scheduler knows connectors, not what they connect to."""

from __future__ import annotations

from engine.messages import KVRole
from engine.scheduling.batch import SampledToken
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import FakeClock
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

CONFIG = SchedulerConfig(64, 8, 64, 4, 16)


class HostMemory(KVConnector):
    """A connector to a store outside the pool: full blocks of prompts are read from it, and are written to it at a
    request's end."""

    def __init__(self, num_stored_tokens: int) -> None:
        self.num_stored_tokens = num_stored_tokens
        self.reading: dict[str, list[int]] = {}
        self.writing: dict[str, list[int]] = {}

    def remote_tokens(self, seq: Sequence, num_cached_blocks: int) -> int:
        return min(self.num_stored_tokens, (seq.num_prompt_tokens - 1) // 4 * 4)

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        if seq.num_remote_tokens:
            self.reading[seq.attempt_id] = seq.block_ids[num_cached_blocks : seq.num_remote_tokens // 4]
        return False

    def release(self, seq: Sequence) -> bool:
        self.writing[seq.attempt_id] = list(seq.block_ids)
        return False


def step(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """One step that samples 7 for each request; where its part starts, and of how many tokens it is."""
    output = scheduler.schedule()
    sampled = {part.attempt_id: SampledToken(7) for part in output.seqs if part.sample}
    scheduler.update(output, sampled, 0.0)
    check_scheduler(scheduler)
    return {part.attempt_id: (part.start, len(part.token_ids)) for part in output.seqs}


def test_without_a_connector_every_request_is_computed_here() -> None:
    scheduler = Scheduler(CONFIG, FakeClock())
    for role in KVRole:
        scheduler.submit(submit(role, role, range(10), 2))
    assert step(scheduler) == {"local": (0, 10), "push": (0, 10), "receive": (0, 10)}
    assert step(scheduler) == {"local": (10, 1), "receive": (10, 1)}
    assert scheduler.load().free_blocks == 16


def test_a_part_of_a_prompt_may_come_from_elsewhere_without_a_token() -> None:
    connector = HostMemory(8)
    scheduler = Scheduler(CONFIG, FakeClock(), connector)
    scheduler.submit(submit("a", KVRole.LOCAL, range(11), 2))
    scheduler.submit(submit("b", KVRole.LOCAL, range(50, 54), 2))  # too short to be stored
    assert connector.reading == {"a": [0, 1]}
    assert step(scheduler) == {"b": (0, 4)}
    scheduler.kv_ready("a")
    assert scheduler.load().cached_blocks == 3, "what came can be found"
    assert step(scheduler) == {"a": (8, 3), "b": (4, 1)}
    assert connector.writing == {"b": [3, 4]}
    assert step(scheduler) == {"a": (11, 1)}


def test_blocks_are_held_at_the_end_until_the_connector_is_done_with_them() -> None:
    connector = HostMemory(0)
    scheduler = Scheduler(CONFIG, FakeClock(), connector)
    scheduler.submit(submit("a", KVRole.LOCAL, range(6), 1))
    step(scheduler)
    assert connector.writing == {"a": [0, 1]}
    load = scheduler.load()
    assert (load.free_blocks, load.running, load.waiting) == (14, 0, 0)
    assert not scheduler.has_work
    scheduler.release("a")
    assert scheduler.load().free_blocks == 16
    check_scheduler(scheduler)


def test_what_is_cached_already_needs_no_reading() -> None:
    connector = HostMemory(4)
    scheduler = Scheduler(CONFIG, FakeClock(), connector)
    scheduler.submit(submit("a", KVRole.LOCAL, range(9), 1))
    scheduler.kv_ready("a")
    step(scheduler)
    scheduler.release("a")
    scheduler.submit(submit("b", KVRole.LOCAL, range(11), 1))
    assert connector.reading["b"] == []
    scheduler.kv_ready("b")
    assert step(scheduler) == {"b": (8, 3)}
