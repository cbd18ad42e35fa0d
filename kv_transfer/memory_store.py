"""A KV pool that is nothing but bytes: for tests and benchmarks of transfers, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from core.kv_layout import KVLayout
from kv_transfer.base import Buffer


class MemoryStore:
    """A `BlockStore` of ``num_blocks`` zeroed blocks in ``data``, a bytearray."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.data = bytearray(layout.block_bytes * num_blocks)
        self._layout, self._num_blocks = layout, num_blocks

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    def read_blocks(self, block_ids: Sequence[int]) -> list[Buffer]:
        """Views of the blocks, in order; a run of adjacent ones is one view."""
        pool, size = memoryview(self.data), self._layout.block_bytes
        views: list[Buffer] = []
        start = 0
        for end in range(1, len(block_ids) + 1):
            if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
                views.append(pool[block_ids[start] * size : (block_ids[end - 1] + 1) * size])
                start = end
        return views

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        """Copy whole blocks into the pool; ValueError if ``data`` has another size."""
        size, view = self._layout.block_bytes, memoryview(data)
        if view.nbytes != size * len(block_ids):
            raise ValueError(f"{view.nbytes} bytes for {len(block_ids)} blocks of {size}")
        pool = memoryview(self.data)
        for i, block in enumerate(block_ids):
            if not 0 <= block < self._num_blocks:
                raise ValueError(f"block {block} of {self._num_blocks}")
            pool[block * size : (block + 1) * size] = view[i * size : (i + 1) * size]
