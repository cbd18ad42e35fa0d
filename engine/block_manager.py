"""Who owns which block of the KV pool. Pure bookkeeping: it never touches the memory itself."""

from __future__ import annotations

import heapq
from collections.abc import Hashable


class BlockManager:
    """Owns ``num_blocks`` blocks of ``block_size`` tokens each; every block is free or has exactly one owner.

    Owners are any hashable keys. Blocks with the lowest numbers are handed out first, so that the live ones stay in a
    dense span at the pool's beginning. Pressure is an answer (False), never an exception. No prefix cache yet.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """ValueError unless both are at least 1."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence a heap already
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody owns."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last may be partly filled)."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner: Hashable, num_tokens: int) -> bool:
        """Grow ``owner``'s blocks until they cover its first ``num_tokens`` tokens; never shrinks them.

        All or nothing: False, with nothing changed, if too few blocks are free.
        """
        blocks = self._owned.get(owner)
        missing = self.blocks_for(num_tokens) - (len(blocks) if blocks is not None else 0)
        if missing > len(self._free):
            return False
        if missing > 0:
            if blocks is None:
                blocks = self._owned[owner] = []
            for _ in range(missing):
                blocks.append(heapq.heappop(self._free))
        return True

    def blocks(self, owner: Hashable) -> list[int]:
        """``owner``'s blocks in the order of its tokens: the live list, which `allocate` extends in place. An owner of
        nothing gets an empty list that stays empty."""
        return self._owned.get(owner, [])

    def num_cached_blocks(self, owner: Hashable) -> int:
        """How many of ``owner``'s first blocks held the right content when they were allocated: 0 without a cache."""
        return 0

    def free(self, owner: Hashable) -> int:
        """Take all blocks of ``owner`` back and tell how many they were (0 if it owns none)."""
        blocks = self._owned.pop(owner, [])
        for block in blocks:
            heapq.heappush(self._free, block)
        return len(blocks)

    def check_integrity(self) -> None:
        """AssertionError unless every block of the pool is either free or owned by exactly one owner, once."""
        seen: dict[int, str] = {}
        holders: list[tuple[str, list[int]]] = [("the free list", self._free)]
        holders += [(f"owner {owner!r}", blocks) for owner, blocks in self._owned.items()]
        for holder, blocks in holders:
            for block in blocks:
                if block in seen:
                    raise AssertionError(f"block {block} belongs to {seen[block]} and to {holder}")
                if not 0 <= block < self.num_blocks:
                    raise AssertionError(f"{holder} has block {block}, the pool ends at {self.num_blocks - 1}")
                seen[block] = holder
        if len(seen) != self.num_blocks:
            lost = sorted(set(range(self.num_blocks)) - set(seen))
            raise AssertionError(f"blocks {lost} are neither free nor owned")
