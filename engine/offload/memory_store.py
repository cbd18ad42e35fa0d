"""A store in the memory of the host, for engines whose pool is on a GPU."""

from __future__ import annotations

import threading
from collections import OrderedDict

from engine.offload.block_store import BlockStore


class MemoryStore:
    """A `BlockStore` of at most ``max_bytes``. Blocks that it drops go to ``colder``, if there is one."""

    def __init__(self, max_bytes: int, colder: BlockStore | None = None) -> None:
        self._max_bytes = max_bytes
        self._colder = colder
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._held = 0

    def __contains__(self, digest: bytes) -> bool:
        """Whether it, or the colder store, has the block."""
        return digest in self._blocks or (self._colder is not None and digest in self._colder)

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep a block, and pass the least recently used ones on if there is no room."""
        dropped: list[tuple[bytes, bytes]] = []
        with self._lock:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)
                return
            self._blocks[digest] = data
            self._held += len(data)
            while self._held > self._max_bytes:
                dropped.append(self._blocks.popitem(last=False))
                self._held -= len(dropped[-1][1])
        if self._colder is not None:
            for each in dropped:
                self._colder.put(*each)

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a block from here, else from the colder store."""
        with self._lock:
            data = self._blocks.get(digest)
            if data is not None:
                self._blocks.move_to_end(digest)
                return data
        return None if self._colder is None else self._colder.get(digest)

    def close(self) -> None:
        """Close the colder store. What is in memory is lost."""
        if self._colder is not None:
            self._colder.close()

    @property
    def num_blocks(self) -> int:
        """Number of blocks here and in the colder store; a block in both counts twice."""
        return len(self._blocks) + (0 if self._colder is None else self._colder.num_blocks)
