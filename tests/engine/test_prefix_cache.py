"""Digests name content, and the cache forgets in the right order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.prefix_cache import PrefixCache
from pdserve.core.prefix_digests import PrefixDigests, block_hash
from tests.engine.integrity import check_cache

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


def test_digests_go_on_as_the_tokens_grow() -> None:
    growing, whole = PrefixDigests("s", 2), PrefixDigests("s", 2)
    assert growing.first(1, [1, 2, 3]) == whole.first(2, [1, 2, 3, 4])[:1]
    assert growing.first(2, [1, 2, 3, 4, 5]) == whole.first(2, [1, 2, 3, 4])
    assert growing.first(0, []) == []


def test_hashes_are_those_of_the_digests_and_go_on_as_the_tokens_grow() -> None:
    digests = PrefixDigests("s", 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert list(digests.hashes(tokens[:5])) == [block_hash(each) for each in PrefixDigests("s", 2).first(2, tokens)]
    assert list(digests.hashes(tokens)) == [block_hash(each) for each in PrefixDigests("s", 2).first(3, tokens)]


def test_only_what_is_asked_for_is_hashed() -> None:
    digests = PrefixDigests("s", 2)
    assert next(digests.hashes(range(1000)))
    assert len(digests._digests) == 1


def test_changes_are_told_once_and_as_they_ended() -> None:
    cache = PrefixCache()
    cache.publish(0, b"a")
    cache.publish(1, b"a")
    cache.publish(2, b"b")
    assert cache.take_changes() == {b"a": True, b"b": True}
    assert cache.take_changes() == {}
    cache.retire(0)
    cache.evict()
    cache.publish(3, b"a")
    cache.publish(4, b"c")
    cache.retire(4)
    cache.retire(2)
    cache.evict()
    assert cache.take_changes() == {b"a": True, b"c": False}


def test_the_least_recently_used_is_forgotten_first() -> None:
    cache = PrefixCache()
    for block in range(3):
        cache.publish(block, b"%d" % block)
        assert cache.retire(block)
    cache.revive(0)
    assert cache.retire(0)
    assert list(cache._idle) == [1, 2, 0]
    assert [cache.evict() for _ in range(3)] == [(1, b"1"), (2, b"2"), (0, b"0")]
    assert cache.find([b"0"]) == []
    assert len(cache) == 0
    with pytest.raises(KeyError, match="no block is idle"):
        cache.evict()


def test_a_second_copy_stays_unknown() -> None:
    cache = PrefixCache()
    cache.publish(4, b"x")
    cache.publish(5, b"x")
    cache.publish(4, b"y")
    assert (cache.find([b"x"]), cache.find([b"y"])) == ([4], [])
    assert (cache.knows(4), cache.knows(5)) == (True, False)
    assert not cache.retire(5)
    check_cache(cache)


def test_only_an_unbroken_run_from_the_first_is_found() -> None:
    cache = PrefixCache()
    for block, digest in ((7, b"a"), (3, b"c")):
        cache.publish(block, digest)
    assert cache.find([b"a", b"b", b"c"]) == [7]
    assert cache.find([b"b", b"c"]) == []


def test_integrity_sees_damage() -> None:
    cache = PrefixCache()
    cache.publish(1, b"a")
    cache._idle[2] = None
    with pytest.raises(AssertionError, match=r"blocks \[2\] are kept, but cannot be found"):
        check_cache(cache)
    cache._by_digest[b"b"] = 1
    with pytest.raises(AssertionError, match="do not match"):
        check_cache(cache)
