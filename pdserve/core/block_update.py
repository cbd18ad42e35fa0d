"""What a worker announces of its prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

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
