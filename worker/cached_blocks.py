"""What is in the prefix cache of a worker's engine, for gateways that follow it."""

from __future__ import annotations

from itertools import islice

from pdserve.core.block_update import MAX_UPDATE_BLOCKS, SNAPSHOT, BlockUpdate, pack, unpack


class CachedBlocks:
    """The blocks in the prefix cache of one incarnation, and its last `MAX_UPDATE_BLOCKS` changes.

    Positions number the changes from the start. A gateway says up to which position it knows them, so that nothing is
    kept for each gateway.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}  # in the order in which they came
        self._changes: list[int] = []  # a hash, or ~hash if the block was removed
        self._begins = 0  # position of the first of them

    @property
    def ends(self) -> int:
        """The position after the last change."""
        return self._begins + len(self._changes)

    def change(self, added: bytes, removed: bytes) -> None:
        """Note what the engine has reported (`engine.messages.CacheChanged`)."""
        for block in unpack(removed):
            if block in self._blocks:
                del self._blocks[block]
                self._changes.append(~block)
        for block in unpack(added):
            if block not in self._blocks:
                self._blocks[block] = None
                self._changes.append(block)
        if len(self._changes) > 2 * MAX_UPDATE_BLOCKS:
            surplus = len(self._changes) - MAX_UPDATE_BLOCKS
            self._begins += surplus
            del self._changes[:surplus]

    def since(self, position: int) -> BlockUpdate:
        """The changes from ``position`` on. A snapshot if it is `SNAPSHOT`, unknown, or too long ago: of a larger cache
        it has the blocks that came last."""
        if not self._begins <= position <= self.ends or self.ends - position > MAX_UPDATE_BLOCKS:
            newest = islice(self._blocks, max(0, len(self._blocks) - MAX_UPDATE_BLOCKS), None)
            return BlockUpdate(SNAPSHOT, self.ends, pack(newest))
        last = {max(change, ~change): change >= 0 for change in self._changes[position - self._begins :]}
        added = pack(block for block, is_cached in last.items() if is_cached)
        removed = pack(block for block, is_cached in last.items() if not is_cached)
        return BlockUpdate(position, self.ends, added, removed)
