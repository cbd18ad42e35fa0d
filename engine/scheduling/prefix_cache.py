"""The prefix cache: finds KV blocks by a digest of all tokens up to the end of the block.

The KV of a token depends on all tokens before it, so digests form a chain: the digest of a full block covers the digest
of the block before it and its own token ids. The chain starts with the request's salt. Equal digests mean equal salts
and equal tokens from the first to the last of the block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import xxhash


class PrefixDigests:
    """Digests of one request's full blocks, computed when they are needed."""

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = xxhash.xxh3_128_digest(salt.encode())
        self._digests: list[bytes] = []

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Return the digests of the first ``num_blocks`` blocks, which ``token_ids`` must fill. Between calls,
        ``token_ids`` may only grow."""
        size, digests = self._block_size, self._digests
        while len(digests) < num_blocks:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            tokens = array("q", token_ids[start : start + size])
            digests.append(xxhash.xxh3_128_digest(parent + tokens.tobytes()))
        return digests[:num_blocks]


class PrefixCache:
    """Maps digests to block numbers, and evicts the least recently used block without an owner.

    A block is findable from `publish` until `evict`, and idle (findable without an owner) from `retire` until `revive`
    or `evict`. The block manager decides who owns it.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # least recently used first

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

    def retire(self, block: int) -> bool:
        """Note that ``block`` has lost its last owner. Returns False if it is not findable, and therefore free."""
        if block not in self._digest_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Note that the idle ``block`` has an owner again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the least recently used idle block and return it. KeyError if no block is idle."""
        block = next(iter(self._idle), None)
        if block is None:
            raise KeyError("no block is idle")
        del self._idle[block]
        del self._by_digest[self._digest_of.pop(block)]
        return block
