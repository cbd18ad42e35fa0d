"""Assigns the blocks of the KV pool to owners. It only keeps books and never touches the memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

from engine.scheduling.prefix_cache import PrefixCache


class BlockManager:
    """Manages ``num_blocks`` blocks of ``block_size`` tokens. A block is free, or has one owner, or has several owners
    that share its content.

    Owners are any hashable keys. Free blocks with the lowest numbers are allocated first, so that used blocks stay
    dense at the beginning of the pool. Free blocks that the prefix cache can find are allocated last, the least
    recently used first; ``evicted`` is called with the block and its digest before it is allocated again.
    """

    def __init__(
        self, num_blocks: int, block_size: int, evicted: Callable[[int, bytes], None] = lambda block, digest: None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence a heap already
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * num_blocks  # number of owners of each block
        self._cache = PrefixCache()
        self._evicted = evicted

    @property
    def free_blocks(self) -> int:
        """Number of blocks without an owner, including those that `find` can find."""
        return len(self._free) + self._cache.num_idle

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that `find` can find, including owned blocks."""
        return len(self._cache)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` tokens need; the last may be partly filled."""
        return -(-num_tokens // self.block_size)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest run of ``digests``, from the first, that are cached. They may be evicted
        until `allocate` shares them."""
        return self._cache.find(digests)

    def cost(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """Number of free blocks that `allocate` takes for a new owner."""
        return self.blocks_for(num_tokens) - sum(self._owners[block] > 0 for block in shared)

    def allocate(self, owner: Hashable, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Grow the blocks of ``owner`` until they cover ``num_tokens`` tokens. Never shrinks them.

        ``shared``, the result of a `find` just before, become the first blocks of a new owner, which must not write to
        them. Returns False and changes nothing if too few blocks are free. ValueError if ``owner`` has blocks and
        ``shared`` is not empty.
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
        for block in shared:  # before the others, so that none of them is evicted
            if not self._owners[block]:
                self._cache.revive(block)
            self._owners[block] += 1
            blocks.append(block)
        for _ in range(missing):
            block = heapq.heappop(self._free) if self._free else self._evict()
            self._owners[block] = 1
            blocks.append(block)
        return True

    def _evict(self) -> int:
        block, digest = self._cache.evict()
        self._evicted(block, digest)
        return block

    def blocks(self, owner: Hashable) -> list[int]:
        """Return the block table of ``owner``: the live list, which `allocate` extends in place. For an unknown owner
        it is a new empty list."""
        return self._owned.get(owner, [])

    def publish(self, block: int, digest: bytes) -> None:
        """Make an owned block findable. Its content must be complete and must not change any more. No effect if
        another block has the same ``digest``."""
        self._cache.publish(block, digest)

    def free(self, owner: Hashable) -> int:
        """Take all blocks from ``owner`` and return their number (0 if it has none). Shared blocks stay with their
        other owners; findable blocks stay cached until they are needed."""
        blocks = self._owned.pop(owner, [])
        for block in reversed(blocks):  # the end of a chain is evicted first: it cannot be found without its beginning
            self._owners[block] -= 1
            if not self._owners[block] and not self._cache.retire(block):
                heapq.heappush(self._free, block)
        return len(blocks)

    def take_changes(self) -> dict[bytes, bool]:
        """Return the digests that `find` began or ceased to find since the last call, and whether it finds each now."""
        return self._cache.take_changes()

    def owned_only_by(self, owners: Sequence[Hashable]) -> bool:
        """Whether `free` for all of ``owners`` would free at least one block."""
        counts: dict[int, int] = {}
        for owner in owners:
            for block in self.blocks(owner):
                counts[block] = counts.get(block, 0) + 1
        return any(self._owners[block] == count for block, count in counts.items())
