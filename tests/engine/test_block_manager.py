"""Blocks are conserved whatever is allocated, grown and freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_manager import BlockManager


def test_allocate_covers_the_tokens_and_no_more() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    assert manager.allocate("a", 9)
    assert manager.blocks("a") == [0, 1, 2]
    assert manager.free_blocks == 5


def test_growth_extends_the_live_list_and_never_shrinks() -> None:
    manager = BlockManager(8, 4)
    assert manager.allocate("a", 4)
    live = manager.blocks("a")
    assert manager.allocate("b", 1)
    assert manager.allocate("a", 5)
    assert live == [0, 2]
    assert live is manager.blocks("a")
    assert manager.allocate("a", 1)
    assert live == [0, 2]


def test_pressure_is_an_answer_and_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    assert manager.allocate("a", 5)
    assert not manager.allocate("b", 5)
    assert not manager.allocate("a", 13)
    assert manager.blocks("a") == [0, 1]
    assert manager.blocks("b") == []
    assert manager.free_blocks == 1
    manager.check_integrity()


def test_lowest_numbers_first_so_that_the_live_span_stays_dense() -> None:
    manager = BlockManager(10, 1)
    for owner, tokens in (("a", 3), ("b", 3), ("c", 3)):
        assert manager.allocate(owner, tokens)
    assert manager.free("b") == 3
    assert manager.free("a") == 3
    assert manager.allocate("d", 4)
    assert manager.blocks("d") == [0, 1, 2, 3]


def test_freeing_an_owner_of_nothing_frees_nothing() -> None:
    manager = BlockManager(2, 1)
    assert manager.allocate("a", 2)
    assert manager.free("b") == 0
    assert manager.free("a") == 2
    assert manager.free("a") == 0
    assert manager.free_blocks == 2
    manager.check_integrity()


def test_the_empty_list_of_an_owner_of_nothing_is_not_shared() -> None:
    manager = BlockManager(2, 1)
    manager.blocks("a").append(7)
    assert manager.blocks("a") == []
    manager.check_integrity()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(num_blocks, block_size)


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        (lambda m: m._free.append(0), "block 0 belongs to the free list and to owner 'a'"),
        (lambda m: m._owned.update(b=[1]), "block 1 belongs to owner 'a' and to owner 'b'"),
        (lambda m: m._owned["a"].append(99), "has block 99, the pool ends at 3"),
        (lambda m: m._free.remove(3), "blocks \\[3\\] are neither free nor owned"),
    ],
)
def test_integrity_sees_each_kind_of_damage(corrupt: object, complaint: str) -> None:
    manager = BlockManager(4, 1)
    assert manager.allocate("a", 2)
    manager.check_integrity()
    assert callable(corrupt)
    corrupt(manager)
    with pytest.raises(AssertionError, match=complaint):
        manager.check_integrity()


OWNERS = st.sampled_from("abcde")
OPERATIONS = st.lists(st.one_of(st.tuples(OWNERS, st.integers(0, 40)), OWNERS), max_size=60)


@given(st.integers(1, 12), st.integers(1, 5), OPERATIONS)
def test_blocks_are_conserved(num_blocks: int, block_size: int, operations: list[tuple[str, int] | str]) -> None:
    """A plain model (owner → number of blocks) agrees after each operation."""
    manager = BlockManager(num_blocks, block_size)
    held: dict[str, int] = {}
    for operation in operations:
        if isinstance(operation, str):
            assert manager.free(operation) == held.pop(operation, 0)
        else:
            owner, num_tokens = operation
            before = list(manager.blocks(owner))
            want = max(-(-num_tokens // block_size), held.get(owner, 0))
            fits = want - held.get(owner, 0) <= num_blocks - sum(held.values())
            lowest_free = sorted(set(range(num_blocks)) - {b for o in held for b in manager.blocks(o)})
            assert manager.allocate(owner, num_tokens) is fits
            if fits:
                held[owner] = want
                assert manager.blocks(owner) == before + lowest_free[: want - len(before)]
            else:
                assert manager.blocks(owner) == before
        manager.check_integrity()
        assert manager.free_blocks == num_blocks - sum(held.values())
        assert all(len(manager.blocks(owner)) == number for owner, number in held.items())
    for owner in list(held):
        manager.free(owner)
    assert manager.free_blocks == num_blocks
