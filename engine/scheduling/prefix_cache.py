"""Which blocks hold the KV of which tokens: found by a digest of everything up to the block's end.

The KV of a token depends on all tokens before it, so a block is named by a chain: the digest of a full block covers the
digest of the block before it and its own token ids; the first block's parent is made from the request's salt. Equal
digests mean equal salts and equal tokens from the prompt's first to the block's last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import xxhash


class PrefixDigests:
    """The digests of one request's full blocks, made as they are asked for. Its tokens only ever grow."""

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = xxhash.xxh3_128_digest(salt.encode())
        self._digests: list[bytes] = []

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The digests of the first ``num_blocks`` blocks, which ``token_ids`` must fill."""
        size, digests = self._block_size, self._digests
        while len(digests) < num_blocks:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            tokens = array("q", token_ids[start : start + size])
            digests.append(xxhash.xxh3_128_digest(parent + tokens.tobytes()))
        return digests[:num_blocks]


class PrefixCache:
    """Blocks that can be found by their content, and in which order those that nobody owns are given up.

    It knows blocks by number only; who owns them is the block manager's. A block is findable from `publish` until
    `evict`, and idle between `retire` and `revive` or `evict`.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        """How many blocks are findable."""
        return len(self._by_digest)

    def knows(self, block: int) -> bool:
        """Whether ``block`` is findable."""
        return block in self._digest_of

    @property
    def num_idle(self) -> int:
        """How many findable blocks have no owner."""
        return len(self._idle)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of ``digests``, from the first, that are findable."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Make an owned block findable. A copy of what is findable already stays unknown."""
        if digest not in self._by_digest and block not in self._digest_of:
            self._by_digest[digest] = block
            self._digest_of[block] = digest

    def retire(self, block: int) -> bool:
        """Nobody owns ``block`` any more; False: it is not findable, and hence plainly free."""
        if block not in self._digest_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Somebody owns the idle ``block`` again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the idle block that was used least recently; KeyError if none is idle."""
        block = next(iter(self._idle), None)
        if block is None:
            raise KeyError("no block is idle")
        del self._idle[block]
        del self._by_digest[self._digest_of.pop(block)]
        return block
