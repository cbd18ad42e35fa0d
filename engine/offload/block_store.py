"""Where the KV of cold blocks goes: a store outside of the pool, keyed by the digests of the prefix cache."""

from __future__ import annotations

from typing import Protocol


class BlockStore(Protocol):
    """Keeps the bytes of full blocks, up to a limit; the least recently used are dropped. A store is a cache: it may
    drop any block at any time. Thread-safe."""

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block of ``digest`` is here, as far as is known without reading it."""
        ...

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep a block, without waiting. No effect if it is here."""
        ...

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a block; None if it is not here, or damaged. May read a file."""
        ...

    def close(self) -> None:
        """Finish what is being written."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks here."""
        ...
