"""The paged KV cache of one device: a tensor in the engine process that the worker process also maps."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import FP8, KVLayout, probe_area
from runtime import memory_file
from runtime.cuda import Cuda
from runtime.host_memory import available_bytes

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POOL_DTYPES = TORCH_DTYPES | {FP8: torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Views of one layer's part of the pool.

    A *page* holds the keys, or the values, of one KV head in one block: ``block_size * head_dim`` contiguous numbers.
    Page ``block * KVPool.pages_per_block + n`` of ``pages``, for each n in `KVPool.head_pages`, holds those of a block.
    ``vectors`` are the pages cut into tokens. Both views start at this layer's first page and extend to the end of the
    pool, so that the same indices apply to every layer.
    """

    k: torch.Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v: torch.Tensor  # the same
    pages: torch.Tensor  # [pages from here on, block_size * head_dim]
    vectors: torch.Tensor  # [vectors from here on, head_dim]

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Write ``vectors`` (``[rows, head_dim]``) to the places ``slots`` of `vectors`. Numbers that FP8 cannot hold
        become its largest."""
        if self.vectors.dtype is torch.float8_e4m3fn:
            largest = torch.finfo(self.vectors.dtype).max
            held = vectors.clamp(-largest, largest).to(self.vectors.dtype)
            self.vectors.view(torch.uint8).index_copy_(0, slots, held.view(torch.uint8))
        else:
            self.vectors.index_copy_(0, slots, vectors)


class KVPool:
    """The pool. ``tensor`` is ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``, so a block is one run of
    ``layout.block_bytes`` bytes. The `probe_area` follows the last block.

    Keys and values are computed with in ``compute_dtype`` (default: the pool's dtype). Of a tensor-parallel engine,
    each process computes with some of the ``heads`` (default: all), which are `kv_heads`; pages are of all.
    ``handle`` tells other processes how to map the pool (`kv_transfer.pool.Pool.open`). ``layout`` has one kind of
    cache.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        flat: torch.Tensor,
        handle: dict[str, Any],
        compute_dtype: torch.dtype | None = None,
        heads: range | None = None,
    ) -> None:
        self.layout = layout
        self.compute_dtype = compute_dtype or flat.dtype
        self.num_blocks = num_blocks
        self.handle = handle
        (cache,) = layout.caches
        kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
        self._heads = range(kv_heads) if heads is None else heads
        self.kv_heads, self.head_dim = len(self._heads), head_dim
        self.head_pages = [plane * kv_heads + head for plane in range(2) for head in self._heads]
        self.tensor = flat.view(num_blocks, cache.num_layers, 2, kv_heads, layout.block_size, head_dim)
        self.pages_per_block = cache.num_layers * 2 * kv_heads
        pages = flat.view(-1, layout.block_size * head_dim)
        self.layers = [
            LayerKV(
                k=self.tensor[:, layer, 0],
                v=self.tensor[:, layer, 1],
                pages=pages[layer * 2 * kv_heads :],
                vectors=pages[layer * 2 * kv_heads :].view(-1, head_dim),
            )
            for layer in range(layout.num_layers)
        ]

    @classmethod
    def on_memory_file(
        cls,
        layout: KVLayout,
        num_blocks: int,
        fd: int,
        compute_dtype: torch.dtype | None = None,
        heads: range | None = None,
        made: bool = False,
    ) -> KVPool:
        """Create a pool in the anonymous memory file ``fd``. The file gets its size and is filled with zeros here, so
        that no step pays for first touches, unless another process has ``made`` it so. `ConfigError` if the host has
        too little memory."""
        size = layout.block_bytes * num_blocks
        whole = sum(probe_area(size))
        available = available_bytes()
        if whole > available and not made:  # the kernel would kill a process for memory
            raise _does_not_fit(size, f"the host has {available / 2**20:.0f} MiB available")
        try:
            if not made:
                os.posix_fallocate(fd, 0, whole)
                memory_file.seal(fd)
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise _does_not_fit(size, str(error.strerror)) from None
        flat = torch.frombuffer(mapping, dtype=POOL_DTYPES[layout.dtype])
        return cls(layout, num_blocks, flat, {"kind": "memfd", "bytes": size}, compute_dtype, heads)

    @classmethod
    def on_cuda(
        cls,
        layout: KVLayout,
        num_blocks: int,
        cuda: Cuda,
        index: int,
        memory: Callable[[int], list[Any]] = lambda num_bytes: [],
        compute_dtype: torch.dtype | None = None,
    ) -> KVPool:
        """Create a pool on GPU ``index``, in memory of another process that ``memory`` returns a handle of, by its
        bytes; if that is empty, in memory of this one. `ConfigError` if it does not fit."""
        size = layout.block_bytes * num_blocks
        whole_bytes = sum(probe_area(size))
        share = memory(whole_bytes)
        try:
            whole = cuda.open(share, index) if share else cuda.zeros(whole_bytes, index)
        except torch.OutOfMemoryError:
            raise _does_not_fit(size, "the GPU has too little free memory") from None
        flat = whole[:size].view(POOL_DTYPES[layout.dtype])
        handle = {"kind": "cuda_ipc", "bytes": size, "share": share or cuda.share(whole)}
        return cls(layout, num_blocks, flat, handle, compute_dtype)

    def clear(self, block: int) -> None:
        """Zero a block, or what this process computes with."""
        self.tensor[block][:, :, self._heads.start : self._heads.stop].zero_()

    def read(self, block: int) -> bytes:
        """A copy of a block, after all steps launched so far. It waits for them."""
        return self._bytes(block).cpu().numpy().tobytes()

    def write(self, block: int, data: bytes) -> None:
        """Overwrite a block, before all steps launched from now on: the copy is complete when this returns."""
        self._bytes(block).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _bytes(self, block: int) -> torch.Tensor:
        return self.tensor[block].view(-1).view(torch.uint8)


def _does_not_fit(size: int, why: str) -> ConfigError:
    return ConfigError(f"engine.kv_memory_mb: a KV pool of {size / 2**20:.0f} MiB does not fit: {why}")
