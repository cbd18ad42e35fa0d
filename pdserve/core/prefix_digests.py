"""Names of KV blocks by their content, and what a worker announces of its prefix cache.

The KV of a token depends on all tokens before it, so digests form a chain: the digest of a full block covers the digest
of the block before it and its own token ids. The chain starts with the request's salt. Equal digests mean equal salts
and equal tokens from the first to the last of the block.

The hash is fast and not cryptographic: for a known salt, a prompt could be made whose digests are those of a prompt of
another salt. So the gateway replaces salts, which can be guessed, by their `keyed_salt`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

SALT_BYTES = 16


def keyed_salt(salt: str, key: bytes) -> str:
    """A salt that cannot be known without ``key`` (at most 64 bytes)."""
    return hashlib.blake2b(salt.encode(), key=key, digest_size=SALT_BYTES).hexdigest()


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

    def hashes(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The `block_hash` of each full block of ``token_ids``, which may only have grown since the last call."""
        for index in range(len(token_ids) // self._block_size):
            if index >= len(self._digests):
                self.first(index + 1, token_ids)
            yield block_hash(self._digests[index])


def block_hash(digest: bytes) -> int:
    """The 64 bits of a digest by which workers announce a cached block. Routing alone relies on them: an engine
    compares whole digests."""
    return int.from_bytes(digest[:8], "little")


SNAPSHOT = -1
"""The position of one who knows nothing of a worker's cache: the next update must be a snapshot."""

MAX_UPDATE_BLOCKS = 2**16
"""Most blocks of an update: 512 KiB."""


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of a worker's prefix cache since ``begins``, up to ``ends``: positions in the sequence of all changes of
    this incarnation. A snapshot (``begins`` is `SNAPSHOT`) has all blocks in ``added`` instead.

    ``added`` and ``removed`` are the `pdserve.core.prefix_digests.block_hash` of each block, packed (`pack`).
    ValueError if one of them is no whole number of hashes, or has more than `MAX_UPDATE_BLOCKS`.
    """

    begins: int
    ends: int
    added: bytes = b""
    removed: bytes = b""

    def __post_init__(self) -> None:
        for packed in (self.added, self.removed):
            if len(packed) % 8 or len(packed) > 8 * MAX_UPDATE_BLOCKS:
                raise ValueError(f"{len(packed)} bytes are not up to {MAX_UPDATE_BLOCKS} hashes of 8 bytes")


def pack(hashes: Iterable[int]) -> bytes:
    """Hashes of 64 bits as bytes, in the byte order of this machine."""
    return array("Q", hashes).tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """The hashes in ``packed``, a whole number of them."""
    return array("Q", packed)
