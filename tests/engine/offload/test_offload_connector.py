"""Blocks that the pool has no room for come back with the KV that they had."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from contract.engine import KVReady, KVRole
from engine.offload import BlockStore, MemoryStore, OffloadConnector
from engine.scheduling.batch import SampledToken
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import FakeClock
from pdserve.core.kv_layout import KVLayout
from pdserve.core.prefix_digests import PrefixDigests
from tests.engine.harness import submit
from tests.engine.integrity import check_scheduler

SIZE = 4
NUM_BLOCKS = 8


class FakeBlocks:
    """A pool of which a full block holds its digest, and an unfinished one nothing."""

    def __init__(self) -> None:
        self.content = [b""] * NUM_BLOCKS

    def read(self, block: int) -> bytes:
        return self.content[block]

    def write(self, block: int, data: bytes) -> None:
        self.content[block] = data


class Engine:
    """A scheduler with an offload connector, and steps that "compute" digests."""

    def __init__(self, store: BlockStore) -> None:
        self.memory = FakeBlocks()
        self.done: deque[KVReady] = deque()
        self.arrived = threading.Condition()
        layout = KVLayout.uniform("m", "float32", SIZE, 1, 1, 2)
        self.connector = OffloadConnector(
            FakeClock(), layout, 0, store, self.memory.read, self.memory.write, self._done
        )
        config = SchedulerConfig(16, 4, NUM_BLOCKS * SIZE, SIZE, NUM_BLOCKS)
        self.scheduler = Scheduler(config, FakeClock(), self.connector)
        self.salts: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def _done(self, command: KVReady) -> None:
        with self.arrived:
            self.done.append(command)
            self.arrived.notify_all()

    def submit(
        self, attempt_id: str, prompt: list[int], max_tokens: int, salt: str = "", role: KVRole = KVRole.LOCAL
    ) -> None:
        self.salts[attempt_id] = salt
        self.scheduler.submit(submit(attempt_id, role, prompt, max_tokens, salt=salt))

    def take_arrived(self) -> None:
        while self.done:
            command = self.done.popleft()
            self.scheduler.kv_ready(command.attempt_id, command.first_token_id, command.num_tokens)

    def step(self) -> bool:
        """One step; whether anything was computed. Checks that each request's full blocks hold their own KV."""
        self.take_arrived()
        output = self.scheduler.schedule() if self.scheduler.has_work else None
        if output is None or not output.seqs:
            return False
        for part in output.seqs:
            seq = self.scheduler._seqs[part.attempt_id]
            digests = PrefixDigests(self.salts[part.attempt_id], SIZE).first(part.end // SIZE, seq.token_ids)
            before = part.start // SIZE
            assert [self.memory.content[block] for block in part.block_ids[:before]] == list(digests[:before])
            for index in range(before, -(-part.end // SIZE)):
                self.memory.content[part.block_ids[index]] = digests[index] if index < part.end // SIZE else b""
        sampled = {part.attempt_id: [SampledToken(7)] for part in output.seqs if part.sample}
        for token in self.scheduler.update(output, sampled, 0.0).tokens:
            self.cached.setdefault(token.attempt_id, token.cached_tokens)
        check_scheduler(self.scheduler)
        return True

    def run(self) -> None:
        """Steps until nothing is under way."""
        while self.step() or self.scheduler.load().waiting:
            with self.arrived:
                if not self.scheduler.has_work and not self.done and self.scheduler.load().waiting:
                    assert self.arrived.wait(10), "a request awaits KV that never comes"

    def close(self) -> None:
        self.connector.close()


def fill(engine: Engine, name: str) -> None:
    """Let other prompts take the whole pool."""
    engine.submit(name, [ord(name[0]) + 100 + i for i in range(30)], 1, salt=name)
    engine.run()


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.PUSH])
def test_a_prompt_that_was_forgotten_is_read(role: KVRole) -> None:
    engine = Engine(MemoryStore(2**20))
    prompt = list(range(19))
    engine.submit("a", prompt, 1)
    engine.run()
    fill(engine, "x")
    assert engine.connector.num_stored_blocks == 4
    engine.submit("b", [*prompt[:16], 50, 51, 52], 2, role=role)
    engine.run()
    assert engine.cached == {"a": 0, "x": 0, "b": 16}
    engine.submit("c", prompt, 1, salt="another tenant")
    if role is KVRole.PUSH:
        engine.scheduler.release("b")
    engine.run()
    assert engine.cached["c"] == 0
    assert engine.scheduler.load().free_blocks == NUM_BLOCKS
    assert engine.scheduler.load().prompt_tokens_cached == 16
    engine.close()


@pytest.mark.parametrize("how", ["damaged", "broken"])
def test_what_cannot_be_read_is_computed(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A block that is damaged costs time only, and so does a store with a bug."""

    class Unreadable(MemoryStore):
        def get(self, digest: bytes) -> bytes | None:
            if digest != digests[2]:
                return super().get(digest)
            if how == "broken":
                raise RuntimeError("the store is broken")
            return None

    engine = Engine(Unreadable(2**20))
    prompt = list(range(19))
    digests = PrefixDigests("", SIZE).first(4, prompt)
    engine.submit("a", prompt, 1)
    engine.run()
    for name in ("b", "c"):  # the reader goes on
        fill(engine, f"before {name}")
        engine.submit(name, prompt, 1)
        engine.run()
        assert engine.cached[name] == 8
    assert ("the store is broken" in caplog.text) == (how == "broken")
    assert engine.scheduler.load().free_blocks == NUM_BLOCKS
    engine.close()


def test_blocks_of_an_aborted_request_are_not_written() -> None:
    class Slow(MemoryStore):
        """A store that gives blocks when it is told to."""

        def __init__(self) -> None:
            super().__init__(2**20)
            self.asked, self.go = threading.Semaphore(0), threading.Semaphore(0)

        def get(self, digest: bytes) -> bytes | None:
            self.asked.release()
            assert self.go.acquire(timeout=10)
            return super().get(digest)

    store = Slow()
    engine = Engine(store)
    prompt = list(range(19))
    engine.submit("a", prompt, 1)
    engine.run()
    fill(engine, "x")
    engine.submit("b", prompt, 1)
    assert store.asked.acquire(timeout=10)
    engine.scheduler.abort("b")
    assert engine.scheduler.load().free_blocks == NUM_BLOCKS
    before = list(engine.memory.content)
    store.go.release(10)
    engine.close()  # joins the reader
    assert engine.memory.content == before
    assert not engine.done
    check_scheduler(engine.scheduler)
