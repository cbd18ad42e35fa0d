"""A worker process's view of its engine's KV pool, as bytes. It satisfies `kv_transfer.base.BlockStore`.

On CPUs both processes map the same anonymous memory file, and nothing here imports torch. On CUDA the pool is opened by
its IPC handle and staged through pinned memory.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from core.kv_layout import KVLayout

if TYPE_CHECKING:
    import torch

Buffer = bytes | bytearray | memoryview


def runs(block_ids: Sequence[int], num_blocks: int) -> Iterator[tuple[int, int]]:
    """``(first block, blocks)`` of each stretch of adjacent ids, in order; ValueError for ids outside the pool."""
    start = count = 0
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block {block_id} is outside the pool of {num_blocks} blocks")
        if count and block_id == start + count:
            count += 1
            continue
        if count:
            yield start, count
        start, count = block_id, 1
    if count:
        yield start, count


class MappedPool:
    """The pool of ``num_blocks`` blocks that ``handle`` (of `engine.messages.Ready`) describes.

    ``memory_fd`` is the pool's memory file (CPU only); it is not closed here.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, handle: Mapping[str, Any], memory_fd: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        expected = layout.block_bytes * num_blocks
        if handle["bytes"] != expected:
            raise ValueError(f"the pool has {handle['bytes']} bytes, its layout needs {expected}")
        self._store: _HostStore | _CudaStore
        if handle["kind"] == "memfd":
            self._store = _HostStore(memory_fd, expected)
        else:
            self._store = _CudaStore(handle, expected)

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    def read_blocks(self, block_ids: Sequence[int]) -> list[Buffer]:
        """The bytes of whole blocks, in order; adjacent ones are one buffer. On CPUs these are views of the pool
        itself, on CUDA staged copies. ValueError for block ids outside the pool."""
        size = self._layout.block_bytes
        found = list(runs(block_ids, self._num_blocks))
        buffers = [self._store.read(start * size, count * size) for start, count in found]
        self._store.flush()
        return buffers

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        """Copy ``data`` (whole blocks, in order) into the pool; returns when it is there. ValueError for block ids
        outside the pool or data of another size; nothing is written then."""
        size = self._layout.block_bytes
        found = list(runs(block_ids, self._num_blocks))
        view = memoryview(data).cast("B")
        if view.nbytes != size * len(block_ids):
            raise ValueError(f"{view.nbytes} bytes do not fill {len(block_ids)} blocks of {size} bytes")
        offset = 0
        for start, count in found:
            self._store.write(start * size, view[offset : offset + count * size])
            offset += count * size
        self._store.flush()

    def close(self) -> None:
        """Let go of the mapping; views handed out stay valid until they are dropped. Closing twice is fine."""
        self._store.close()


class _HostStore:
    def __init__(self, fd: int, size: int) -> None:
        self._map: mmap.mmap | None = mmap.mmap(fd, size)
        self._view = memoryview(self._map)

    def read(self, offset: int, size: int) -> Buffer:
        return self._view[offset : offset + size]

    def write(self, offset: int, data: memoryview) -> None:
        # numpy lets go of the GIL for the copy, slice assignment does not.
        target = np.frombuffer(self._view[offset : offset + data.nbytes], dtype=np.uint8)
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # somebody still reads a view; it goes when the view does
                self._map.close()
            self._map = None


class _CudaStore:
    """Copies run on a stream of their own, through pinned memory: they neither wait for other work nor hold it up.
    What `read` hands out is filled, and what `write` got is in the pool, once `flush` has returned."""

    def __init__(self, handle: Mapping[str, Any], size: int) -> None:
        import torch

        self._torch = torch
        storage = torch.UntypedStorage._new_shared_cuda(*handle["share"])
        device = torch.device("cuda", handle["share"][0])
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:size]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _pool(self) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError("the pool is closed")
        return self._bytes

    def read(self, offset: int, size: int) -> Buffer:
        staged = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        with self._torch.cuda.stream(self._stream):
            staged.copy_(self._pool()[offset : offset + size], non_blocking=True)
        return staged.numpy().data

    def write(self, offset: int, data: memoryview) -> None:
        staged = self._torch.empty(data.nbytes, dtype=self._torch.uint8, pin_memory=True)
        np.copyto(staged.numpy(), np.frombuffer(data, dtype=np.uint8))
        with self._torch.cuda.stream(self._stream):
            self._pool()[offset : offset + data.nbytes].copy_(staged, non_blocking=True)

    def flush(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._bytes = None
