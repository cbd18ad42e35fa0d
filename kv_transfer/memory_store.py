"""A KV pool that is nothing but bytes, without an engine: for whoever measures or tests transfers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from kv_transfer.shared_memory import SharedMemory
from kv_transfer.sink import Stretch
from pdserve.core import memory_file
from pdserve.core.kv_layout import KVLayout, blank_memory


class _Place(NamedTuple):
    parts: list[Stretch]

    def commit(self) -> None:
        pass


class MemoryStore:
    """A `BlockStore` of ``num_blocks`` zeroed blocks in ``data``, the beginning of an anonymous memory file as engines
    have it; ``whole`` is all of that file, with the zeros behind the blocks (as many as behind a
    pool, or ``blank_bytes``)."""

    def __init__(self, layout: KVLayout, num_blocks: int, blank_bytes: int | None = None) -> None:
        self._layout, self._num_blocks = layout, num_blocks
        size = layout.block_bytes * num_blocks
        fd = memory_file.create("pdserve-kv")
        offset, default = blank_memory(size)
        whole = offset + (blank_bytes or default)
        os.ftruncate(fd, whole)
        memory_file.seal(fd)
        self.whole = memoryview(mmap.mmap(fd, whole, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        self.data, self._blank = self.whole[:size], self.whole[offset:]
        self.memory = SharedMemory(fd, self.whole)

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    def read_blocks(
        self, block_ids: Sequence[int], layers: range | None = None, *, on_device: bool = False
    ) -> list[Stretch]:
        """Views of blocks (or ``layers`` of them), in order; what touches is one view."""
        return [*self._parts(block_ids, layers, on_device)]

    def land(self, block_ids: Sequence[int], layers: range | None = None, *, on_device: bool = False) -> _Place:
        """The blocks themselves."""
        return _Place(self._parts(block_ids, layers, on_device))

    @property
    def blank_bytes(self) -> int:
        """Zeros behind the blocks."""
        return self._blank.nbytes

    def blank(self, start: int, size: int, *, on_device: bool = False) -> Stretch:
        """Zeros of the same memory file, behind the blocks."""
        return self._part(self._blank[start : start + size], on_device)

    def scratch(self, size: int, *, on_device: bool = False) -> Stretch:
        """Fresh memory."""
        return self._part(memoryview(bytearray(size)), on_device)

    def _parts(self, block_ids: Sequence[int], layers: range | None, on_device: bool) -> list[Stretch]:
        runs = self._layout.byte_runs(
            block_ids, self._layout.all_layers if layers is None else layers, self._num_blocks
        )
        return [self._part(self.data[offset : offset + size], on_device) for offset, size in runs]

    @staticmethod
    def _part(view: memoryview, on_device: bool) -> Stretch:
        """Where tests have a device, it is the host: tensors over the same memory."""
        if not on_device:
            return view
        import torch

        return torch.frombuffer(view, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.memory.fd)
