"""The prefix cache: finds KV blocks by a digest of all tokens up to the end of the block
(`pdserve.core.prefix_digests`)."""

from __future__ import annotations

from collections.abc import Iterable


class PrefixCache:
    """Maps digests to block numbers, and evicts the least recently used block without an owner.

    A block is findable from `publish` until `evict`, and idle (findable without an owner) from `retire` until `revive`
    or `evict`. The block manager decides who owns it. `take_changes` tells which digests became findable or stopped to
    be.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # least recently used first
        self._changes: dict[bytes, bool] = {}  # whether the digest is findable now

    def __len__(self) -> int:
        """Number of findable blocks."""
        return len(self._by_digest)

    def knows(self, block: int) -> bool:
        """Whether ``block`` is findable."""
        return block in self._digest_of

    @property
    def num_idle(self) -> int:
        """Number of findable blocks without an owner."""
        return len(self._idle)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest run of ``digests``, from the first, that are findable."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Make an owned block findable, unless another block with this digest is."""
        if digest not in self._by_digest and block not in self._digest_of:
            self._by_digest[digest] = block
            self._digest_of[block] = digest
            self._changes[digest] = True

    def retire(self, block: int) -> bool:
        """Note that ``block`` has lost its last owner. Returns False if it is not findable, and therefore free."""
        if block not in self._digest_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Note that the idle ``block`` has an owner again."""
        del self._idle[block]

    def evict(self) -> tuple[int, bytes]:
        """Forget the least recently used idle block, and return it and its digest. KeyError if no block is idle."""
        block = next(iter(self._idle), None)
        if block is None:
            raise KeyError("no block is idle")
        del self._idle[block]
        digest = self._digest_of.pop(block)
        del self._by_digest[digest]
        self._changes[digest] = False
        return block, digest

    def take_changes(self) -> dict[bytes, bool]:
        """Return the digests that were published or evicted since the last call, and whether each is findable now."""
        changes, self._changes = self._changes, {}
        return changes
