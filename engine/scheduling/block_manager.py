"""Who owns which block of the KV pool. Pure bookkeeping: it never touches the memory itself."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from engine.scheduling.prefix_cache import PrefixCache


class BlockManager:
    """Owns ``num_blocks`` blocks of ``block_size`` tokens each; a block is free, or has one owner, or several that
    share its content.

    Owners are any hashable keys. Pressure is an answer (False), never an exception. Blocks with the lowest numbers are
    handed out first, so that the live ones stay in a dense span at the pool's beginning; free ones whose content can
    still be found only when there are no others, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence a heap already
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * num_blocks  # how many each block has
        self._cache = PrefixCache()

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody owns, those with findable content included."""
        return len(self._free) + self._cache.num_idle

    @property
    def cached_blocks(self) -> int:
        """How many blocks `find` can find, owned ones included."""
        return len(self._cache)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last may be partly filled)."""
        return -(-num_tokens // self.block_size)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest run of ``digests`` from the first. They may be evicted until `allocate`
        shares them."""
        return self._cache.find(digests)

    def cost(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """How many free blocks `allocate` would take for a new owner."""
        return self.blocks_for(num_tokens) - sum(self._owners[block] > 0 for block in shared)

    def allocate(self, owner: Hashable, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Grow ``owner``'s blocks until they cover its first ``num_tokens`` tokens; never shrinks them.

        ``shared`` (found just before, no more than are needed) become the first blocks of a new owner; it must not
        write to them. All or nothing: False, with nothing changed, if too few blocks are free. ValueError for an
        ``owner`` that is not new and shares.
        """
        blocks = self._owned.get(owner)
        if blocks and shared:
            raise ValueError(f"owner {owner!r} has blocks already and cannot begin with shared ones")
        missing = self.blocks_for(num_tokens) - len(blocks or ()) - len(shared)
        if missing + sum(self._owners[block] == 0 for block in shared) > self.free_blocks:
            return False
        if missing <= 0 and not shared:
            return True
        if blocks is None:
            blocks = self._owned[owner] = []
        for block in shared:  # first of all, so that none of them is evicted for the others
            if not self._owners[block]:
                self._cache.revive(block)
            self._owners[block] += 1
            blocks.append(block)
        for _ in range(missing):
            block = heapq.heappop(self._free) if self._free else self._cache.evict()
            self._owners[block] = 1
            blocks.append(block)
        return True

    def blocks(self, owner: Hashable) -> list[int]:
        """``owner``'s blocks in the order of its tokens: the live list, which `allocate` extends in place. An owner of
        nothing gets an empty list that stays empty."""
        return self._owned.get(owner, [])

    def publish(self, block: int, digest: bytes) -> None:
        """Let `find` know an owned block whose content is complete and right; it must never change from now on. No
        effect if another block is known by ``digest``."""
        self._cache.publish(block, digest)

    def free(self, owner: Hashable) -> int:
        """Take all blocks of ``owner`` back and tell how many they were (0 if it owns none). Those that others share
        stay theirs; findable ones are kept as long as there is no better use for them."""
        blocks = self._owned.pop(owner, [])
        for block in reversed(blocks):  # of a chain the end goes first: nothing finds it without its beginning
            self._owners[block] -= 1
            if not self._owners[block] and not self._cache.retire(block):
                heapq.heappush(self._free, block)
        return len(blocks)

    def owned_only_by(self, owners: Sequence[Hashable]) -> bool:
        """Whether some block would be free if all of ``owners`` gave theirs back."""
        counts: dict[int, int] = {}
        for owner in owners:
            for block in self.blocks(owner):
                counts[block] = counts.get(block, 0) + 1
        return any(self._owners[block] == count for block, count in counts.items())
