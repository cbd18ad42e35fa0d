"""The announcements of a worker's prefix cache, and the index that gateways make of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.control import MAX_BEAT_BYTES
from engine.scheduling.block_manager import BlockManager
from pdserve.core.prefix_digests import (
    MAX_UPDATE_BLOCKS,
    SNAPSHOT,
    BlockUpdate,
    PrefixDigests,
    block_hash,
    pack,
    unpack,
)
from router.prefix_index import PrefixIndex
from worker import incarnation
from worker.incarnation import CachedBlocks

SIZE = 2
"""Tokens of a block."""


class Engine:
    """A block manager, and the requests on it: what an engine's scheduler does with its prefix cache."""

    def __init__(self, num_blocks: int, epoch: int = 0) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.announced = CachedBlocks()
        self.epoch = epoch
        self._requests: dict[int, tuple[list[int], list[bytes], int]] = {}  # tokens, digests, published blocks

    def admit(self, number: int, tokens: list[int]) -> None:
        """Share what is cached, and allocate the rest if there is room."""
        digests = list(PrefixDigests("", SIZE).first(len(tokens) // SIZE, tokens))
        shared = self.blocks.find(digests)
        if number not in self._requests and self.blocks.allocate(number, len(tokens), shared):
            self._requests[number] = tokens, digests, len(shared)

    def compute(self, number: int) -> None:
        """Make one more block of a request findable."""
        if number in self._requests:
            tokens, digests, done = self._requests[number]
            if done < len(digests):
                self.blocks.publish(self.blocks.blocks(number)[done], digests[done])
                self._requests[number] = tokens, digests, done + 1

    def end(self, number: int) -> None:
        """Free its blocks."""
        if self._requests.pop(number, None):
            self.blocks.free(number)

    def report(self) -> None:
        """Tell the worker of changes, as `engine.core.EngineCore` does."""
        changes = self.blocks.take_changes()
        self.announced.change(
            pack(block_hash(digest) for digest, cached in changes.items() if cached),
            pack(block_hash(digest) for digest, cached in changes.items() if not cached),
        )

    def beat(self, name: str, index: PrefixIndex, *, arrives: bool = True) -> None:
        """Announce what the index does not know, as a heartbeat after the last answer does."""
        update = self.announced.since(index.position(name, str(self.epoch)))
        if arrives:
            index.apply(name, str(self.epoch), update)

    def cached(self, tokens: list[int]) -> int:
        """Tokens at the beginning of a prompt that the engine finds."""
        digests = PrefixDigests("", SIZE).first(len(tokens) // SIZE, tokens)
        return len(self.blocks.find(digests)) * SIZE


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NUMBERS = st.integers(0, 4)
OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), NUMBERS, PROMPTS),
    st.tuples(st.just("compute"), NUMBERS),
    st.tuples(st.just("end"), NUMBERS),
    st.tuples(st.just("report")),
    st.tuples(st.just("beat")),
    st.tuples(st.just("lost beat")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("lost")),
    st.tuples(st.just("new gateway")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), OPERATIONS), max_size=80), st.lists(PROMPTS, min_size=3, max_size=3))
def test_after_a_heartbeat_the_index_finds_what_the_engines_find(
    operations: list[tuple[int, tuple[object, ...]]], prompts: list[list[int]]
) -> None:
    engines, index = [Engine(num_blocks) for num_blocks in (3, 6, 12)], PrefixIndex(100)
    for number, (name, *arguments) in operations:
        engine = engines[number]
        match name:
            case "beat" | "lost beat":
                engine.report()
                engine.beat(f"w{number}", index, arrives=name == "beat")
            case "restart":
                engines[number] = Engine(engine.blocks.num_blocks, engine.epoch + 1)
            case "lost":
                index.remove(f"w{number}")
            case "new gateway":
                index = PrefixIndex(100)
            case _:
                getattr(engine, str(name))(*arguments)
    for number, engine in enumerate(engines):
        engine.report()
        engine.beat(f"w{number}", index)
        assert set(index._workers[f"w{number}"].blocks) == {block_hash(digest) for digest in engine.blocks._by_digest}
    for prompt in prompts:
        found = index.cached(PrefixDigests("", SIZE).hashes(prompt))
        assert {name: count * SIZE for name, count in found.items()} == {
            f"w{number}": engine.cached(prompt) for number, engine in enumerate(engines) if engine.cached(prompt)
        }
    for number in range(3):
        index.remove(f"w{number}")
    assert len(index) == 0


def update(begins: int, ends: int, *added: int, removed: tuple[int, ...] = ()) -> BlockUpdate:
    return BlockUpdate(begins, ends, pack(added), pack(removed))


def test_who_knows_another_incarnation_or_changes_long_ago_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "MAX_UPDATE_BLOCKS", 4)
    announced = CachedBlocks()
    for block in range(20):
        announced.change(pack([block]), pack([block - 2] if block > 1 else []))
    assert announced.ends == 38
    assert len(announced._changes) <= 2 * 4
    for position in (SNAPSHOT, 0, 33, 39):
        assert announced.since(position) == update(SNAPSHOT, 38, 18, 19)
    assert announced.since(34) == update(34, 38, 18, 19, removed=(16, 17))
    assert announced.since(38) == update(38, 38)
    index = PrefixIndex(10)
    index.apply("w", "old", update(SNAPSHOT, 38, 1, 2))
    assert index.position("w", "new") == SNAPSHOT
    index.apply("w", "new", update(38, 39, 3))
    assert set(index._workers["w"].blocks) == {1, 2}, "no snapshot, no effect"
    index.apply("w", "new", update(SNAPSHOT, 1, 3))
    assert set(index._workers["w"].blocks) == {3}


def test_of_a_large_cache_the_last_blocks_are_announced_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    announced, index = CachedBlocks(), PrefixIndex(3)
    announced.change(pack(range(10)), b"")
    index.apply("w", "e", announced.since(SNAPSHOT))
    assert set(index._workers["w"].blocks) == {7, 8, 9}
    announced.change(pack([10]), pack([0, 8]))
    index.apply("w", "e", announced.since(10))
    assert set(index._workers["w"].blocks) == {7, 9, 10}
    monkeypatch.setattr(incarnation, "MAX_UPDATE_BLOCKS", 4)
    assert list(unpack(announced.since(SNAPSHOT).added)) == [6, 7, 9, 10]


def test_what_begins_many_prompts_stays_known_however_old_it_is() -> None:
    index = PrefixIndex(4)
    index.apply("w", "e", update(SNAPSHOT, 2, 1, 2))
    index.apply("v", "e", update(SNAPSHOT, 1, 1))
    for number in range(10, 30):
        assert index.cached([1, 99]) == {"w": 1, "v": 1}
        position = index.position("w", "e")
        index.apply("w", "e", update(position, position + 1, number))
        assert len(index._workers["w"].blocks) <= 4
    assert set(index._workers["w"].blocks) == {1, 27, 28, 29}
    for number in range(30, 40):  # all that it has is used
        index.cached(list(index._workers["w"].blocks))
        position = index.position("w", "e")
        index.apply("w", "e", update(position, position + 1, number))
        assert len(index._workers["w"].blocks) == 4


def test_the_longest_update_fits_into_a_heartbeat() -> None:
    announced = CachedBlocks()
    announced.change(pack(range(MAX_UPDATE_BLOCKS)), b"")
    longest = announced.since(0)
    assert len(longest.added) + len(longest.removed) <= MAX_BEAT_BYTES // 2
    announced.change(pack(range(MAX_UPDATE_BLOCKS, 2 * MAX_UPDATE_BLOCKS)), pack(range(MAX_UPDATE_BLOCKS)))
    assert announced.since(0).begins == SNAPSHOT
