"""Blocks are conserved whatever is allocated, grown and freed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.block_manager import BlockManager
from tests.engine.integrity import check_blocks

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
            live = manager.blocks(owner)
            before = list(live)
            want = max(-(-num_tokens // block_size), held.get(owner, 0))
            fits = want - held.get(owner, 0) <= num_blocks - sum(held.values())
            lowest_free = sorted(set(range(num_blocks)) - {b for o in held for b in manager.blocks(o)})
            assert manager.allocate(owner, num_tokens) is fits
            if fits:
                held[owner] = want
                assert manager.blocks(owner) == before + lowest_free[: want - len(before)]
                assert not before or manager.blocks(owner) is live, "block tables are live lists"
            else:
                assert manager.blocks(owner) == before
        check_blocks(manager)
        assert manager.free_blocks == num_blocks - sum(held.values())
        assert all(len(manager.blocks(owner)) == number for owner, number in held.items())
    for owner in list(held):
        manager.free(owner)
    assert manager.free_blocks == num_blocks


# --- shared and kept blocks ------------------------------------------------------------------------------------------


def published(num_blocks: int = 6) -> BlockManager:
    """Owner "a" has blocks 0 to 2 of one token each, cached as b"0" to b"2"."""
    manager = BlockManager(num_blocks, 1)
    assert manager.allocate("a", 3)
    for block in manager.blocks("a"):
        manager.publish(block, b"%d" % block)
    return manager


def test_kept_blocks_are_found_until_no_other_is_free_and_then_go_end_first() -> None:
    manager = published()
    manager.free("a")
    assert manager.allocate("b", 4)
    assert manager.blocks("b") == [3, 4, 5, 2]
    assert manager.find([b"0", b"1", b"2"]) == [0, 1]
    assert (manager.free_blocks, manager.cached_blocks) == (2, 2)
    assert manager.allocate("b", 6)
    assert manager.blocks("b") == [3, 4, 5, 2, 1, 0]
    assert manager.find([b"0"]) == []
    check_blocks(manager)


def test_whose_blocks_would_be_free() -> None:
    manager = published()
    assert manager.allocate("b", 2, manager.find([b"0", b"1"]))
    assert manager.owned_only_by(["a"])  # block 2
    assert not manager.owned_only_by(["b"])
    assert not manager.owned_only_by([])
    assert manager.owned_only_by(["b", "a"])


PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.integers(1, 10), st.lists(st.one_of(st.tuples(OWNERS, PREFIXES), OWNERS), max_size=40))
def test_a_block_found_by_a_prefix_was_published_for_it(
    num_blocks: int, operations: list[tuple[str, list[int]] | str]
) -> None:
    """Blocks of one token; the model remembers what each block was last filled with."""
    manager = BlockManager(num_blocks, 1)
    content: dict[int, bytes] = {}
    owned: dict[str, list[int]] = {}
    for operation in operations:
        if isinstance(operation, str):
            assert manager.free(operation) == len(owned.pop(operation, []))
        elif operation[0] not in owned:
            owner, tokens = operation
            digests = [bytes(tokens[: i + 1]) for i in range(len(tokens))]
            shared = manager.find(digests)
            assert [content[block] for block in shared] == digests[: len(shared)]
            in_use = {block for blocks in owned.values() for block in blocks}
            fits = len(in_use | set(shared)) + len(tokens) - len(shared) <= num_blocks
            assert (manager.cost(len(tokens), shared) <= manager.free_blocks) == fits
            assert manager.allocate(owner, len(tokens), shared) is fits
            if fits:
                owned[owner] = list(manager.blocks(owner))
                assert owned[owner][: len(shared)] == shared
                assert not in_use & set(owned[owner][len(shared) :])
                for block, digest in list(zip(owned[owner], digests, strict=True))[len(shared) :]:
                    content[block] = digest
                    manager.publish(block, digest)
        check_blocks(manager)
        assert manager.free_blocks == num_blocks - len({block for blocks in owned.values() for block in blocks})
