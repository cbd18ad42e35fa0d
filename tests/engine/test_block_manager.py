"""Blocks that are kept in the cache, and whose blocks would be free. (`test_random_schedules`: all are conserved.)"""

from __future__ import annotations

from engine.scheduling.block_manager import BlockManager
from tests.engine.integrity import check_blocks


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
