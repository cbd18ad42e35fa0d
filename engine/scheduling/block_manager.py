"""Assigns the blocks of the KV pool to owners, and finds cached blocks by a digest of all tokens up to their end
(`pdserve.core.prefix_digests`). It only keeps books and never touches the memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Sequence


class BlockManager:
    """Manages ``num_blocks`` blocks of ``block_size`` tokens. A block is free, or has one owner, or has several owners
    that share its content.

    Owners are any hashable keys. Free blocks with the lowest numbers are allocated first, so that used blocks stay
    dense at the beginning of the pool. A block is cached, so that `find` finds it, from `publish` until it is evicted.
    Cached blocks without an owner count as free and are allocated last, the least recently used first; ``evicted`` is
    called with the block and its digest before it is allocated again.
    """

    def __init__(
        self, num_blocks: int, block_size: int, evicted: Callable[[int, bytes], None] = lambda block, digest: None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence a heap already
        self._owned: dict[Hashable, list[int]] = {}
        self._owners = [0] * num_blocks  # number of owners of each block
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # cached blocks without an owner, least recently used first
        self._changes: dict[bytes, bool] = {}  # whether the digest is cached now
        self._evicted = evicted

    @property
    def free_blocks(self) -> int:
        """Number of blocks without an owner, including those that `find` can find."""
        return len(self._free) + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that `find` can find, including owned blocks."""
        return len(self._by_digest)

    def is_owned(self, block: int) -> bool:
        """Whether a block has an owner."""
        return self._owners[block] > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` tokens need; the last may be partly filled."""
        return -(-num_tokens // self.block_size)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest run of ``digests``, from the first, that are cached. They may be evicted
        until `allocate` shares them."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def cost(self, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """Number of free blocks that `allocate` takes for a new owner."""
        return self.blocks_for(num_tokens) - sum(self._owners[block] > 0 for block in shared)

    def allocate(self, owner: Hashable, num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Grow the blocks of ``owner`` until they cover ``num_tokens`` tokens. Never shrinks them.

        ``shared``, the result of a `find` just before, become the first blocks of a new owner, which must not write to
        them. Returns False and changes nothing if too few blocks are free.
        """
        blocks = self.blocks(owner)
        assert not (blocks and shared), f"owner {owner!r} has blocks already and cannot begin with shared ones"
        missing = self.blocks_for(num_tokens) - len(blocks) - len(shared)
        if missing + sum(self._owners[block] == 0 for block in shared) > self.free_blocks:
            return False
        if missing > 0 or shared:
            self._owned[owner] = blocks
        for block in shared:  # before the others, so that none of them is evicted
            self._idle.pop(block, None)
            self._owners[block] += 1
            blocks.append(block)
        for _ in range(missing):
            block = heapq.heappop(self._free) if self._free else self._evict()
            self._owners[block] = 1
            blocks.append(block)
        return True

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        digest = self._digest_of.pop(block)
        del self._by_digest[digest]
        self._changes[digest] = False
        self._evicted(block, digest)
        return block

    def blocks(self, owner: Hashable) -> list[int]:
        """Return the block table of ``owner``: the live list, which `allocate` extends in place. For an unknown owner
        it is a new empty list."""
        return self._owned.get(owner, [])

    def publish(self, block: int, digest: bytes) -> None:
        """Cache an owned block. Its content must be complete and must not change any more. No effect if another block
        with the same ``digest`` is cached."""
        if digest not in self._by_digest and block not in self._digest_of:
            self._by_digest[digest] = block
            self._digest_of[block] = digest
            self._changes[digest] = True

    def free(self, owner: Hashable) -> int:
        """Take all blocks from ``owner`` and return their number (0 if it has none). Shared blocks stay with their
        other owners; cached ones stay cached until they are needed."""
        blocks = self._owned.pop(owner, [])
        for block in reversed(blocks):  # the end of a chain is evicted first: it cannot be found without its beginning
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._digest_of:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)
        return len(blocks)

    def take_changes(self) -> dict[bytes, bool]:
        """Return the digests that `find` began or ceased to find since the last call, and whether it finds each now."""
        changes, self._changes = self._changes, {}
        return changes

    def owned_only_by(self, owners: Sequence[Hashable]) -> bool:
        """Whether `free` for all of ``owners`` would free at least one block."""
        counts = Counter(block for owner in owners for block in self.blocks(owner))
        return any(self._owners[block] == count for block, count in counts.items())
