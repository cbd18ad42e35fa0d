"""Digests name content, and the cache forgets in the right order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.block_manager import BlockManager
from pdserve.core.prefix_digests import PrefixDigests, block_hash
from tests.engine.integrity import check_blocks

TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]), st.integers(1, 4))
def test_equal_digests_mean_equal_salts_and_equal_beginnings(
    left: list[int], right: list[int], left_salt: str, right_salt: str, size: int
) -> None:
    mine = PrefixDigests(left_salt, size).first(len(left) // size, left)
    theirs = PrefixDigests(right_salt, size).first(len(right) // size, right)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False), 1):
        assert (a == b) == (left_salt == right_salt and left[: index * size] == right[: index * size])
    assert len({*mine, *theirs}) == len(mine) + len(theirs) - sum(a == b for a, b in zip(mine, theirs, strict=False))


def test_hashes_are_those_of_the_digests_and_go_on_as_the_tokens_grow() -> None:
    digests = PrefixDigests("s", 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert digests.first(0, []) == []
    assert list(digests.hashes(tokens[:5])) == [block_hash(each) for each in PrefixDigests("s", 2).first(2, tokens)]
    assert list(digests.hashes(tokens)) == [block_hash(each) for each in PrefixDigests("s", 2).first(3, tokens)]


def cache(*digests: bytes) -> BlockManager:
    """A manager whose owners 0, 1, … have one block each, with these digests."""
    manager = BlockManager(len(digests), 1)
    for owner, digest in enumerate(digests):
        assert manager.allocate(owner, 1)
        manager.publish(owner, digest)
    return manager


def test_changes_are_told_once_and_as_they_ended() -> None:
    manager = cache(b"a", b"a", b"b")
    assert manager.take_changes() == {b"a": True, b"b": True}
    assert manager.take_changes() == {}
    for owner in (2, 0):
        manager.free(owner)
        assert manager.allocate(f"new {owner}", 1)  # evicts it
    manager.publish(2, b"c")
    manager.publish(0, b"b")
    assert manager.take_changes() == {b"a": False, b"b": True, b"c": True}


def test_the_least_recently_used_is_evicted_first() -> None:
    manager = cache(b"0", b"1", b"2")
    for owner in range(3):
        manager.free(owner)
    assert manager.allocate("again", 1, manager.find([b"0"]))
    manager.free("again")
    assert manager.allocate("all", 3)
    assert manager.blocks("all") == [1, 2, 0]
    assert (manager.find([b"0"]), manager.cached_blocks) == ([], 0)


def test_a_second_copy_stays_unknown() -> None:
    manager = cache(b"x", b"x")
    manager.publish(0, b"y")
    assert (manager.find([b"x"]), manager.find([b"y"]), manager.cached_blocks) == ([0], [], 1)
    manager.free(1)
    assert manager.allocate("new", 1)
    assert manager.find([b"x"]) == [0]
    check_blocks(manager)
