"""Checks of the scheduler's bookkeeping that tests make after every operation."""

from __future__ import annotations

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler


def check_blocks(manager: BlockManager) -> None:
    """AssertionError unless every block is free, idle in the cache, or owned by as many owners as were counted,
    by none of them twice; only cached blocks may be shared."""
    if {block: digest for digest, block in manager._by_digest.items()} != manager._digest_of:
        raise AssertionError("digests and blocks do not match")
    if unknown := sorted(set(manager._idle) - set(manager._digest_of)):
        raise AssertionError(f"blocks {unknown} are kept, but cannot be found")
    seen: dict[int, str] = {}
    for holder, kept in (("the free list", manager._free), ("the prefix cache", list(manager._idle))):
        for block in kept:
            _check_holder(manager, block, holder, seen)
            seen[block] = holder
    owners = [0] * manager.num_blocks
    for owner, blocks in manager._owned.items():
        holder = f"owner {owner!r}"
        for block in blocks:
            shareable = block in manager._digest_of
            if not shareable or seen.get(block) in ("the free list", "the prefix cache", holder):
                _check_holder(manager, block, holder, seen)
            seen[block] = holder
            owners[block] += 1
    if len(seen) != manager.num_blocks:
        lost = sorted(set(range(manager.num_blocks)) - set(seen))
        raise AssertionError(f"blocks {lost} are neither free nor owned")
    if owners != manager._owners:
        wrong = [block for block in range(manager.num_blocks) if owners[block] != manager._owners[block]]
        raise AssertionError(f"blocks {wrong} have another number of owners than was counted")


def check_scheduler(scheduler: Scheduler) -> None:
    """AssertionError unless every block is free, owned by a request that lives or whose step still runs, or pinned for
    another engine."""
    manager = scheduler.blocks
    check_blocks(manager)
    in_flight = [seq for _, seqs in scheduler._in_flight for seq in seqs]
    owners = {seq.arrival: seq for seq in (*scheduler._seqs.values(), *in_flight)}
    pins = [owner for owner in manager._owned if isinstance(owner, str)]
    owned = len({block for owner in (*owners, *pins) for block in manager.blocks(owner)})
    if owned + manager.free_blocks != manager.num_blocks:
        raise AssertionError(f"{manager.num_blocks - manager.free_blocks - owned} blocks have no request")
    for seq in owners.values():
        if seq.block_ids != manager.blocks(seq.arrival):
            raise AssertionError(f"{seq.attempt_id} does not know its blocks")


def _check_holder(manager: BlockManager, block: int, holder: str, seen: dict[int, str]) -> None:
    if block in seen:
        raise AssertionError(f"block {block} belongs to {seen[block]} and to {holder}")
    if not 0 <= block < manager.num_blocks:
        raise AssertionError(f"{holder} has block {block}, the pool ends at {manager.num_blocks - 1}")
