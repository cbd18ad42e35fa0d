"""The shape of the KV cache, as arithmetic: what a block holds, where it lies, what a hand-off must weigh, and whether
one pool's blocks can be copied into another's.

A block holds ``block_size`` tokens of *all* layers, contiguously. Layers follow each other; one layer of a block is
``[planes, kv_heads, block_size, head_dim]``, where the planes are keys and values. So a block travels as one run of
bytes, one layer of a block as one shorter run, and the KV heads of a tensor-parallel share as one run per plane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from pdserve.core.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of the types that models compute with."""

FP8 = "float8_e4m3fn"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8: 1}
"""Bytes of a number of the types that pools hold."""

MAX_PROBE_BYTES = 8 * 2**20
"""The largest payload that a link is measured with."""
MAX_PROBE_AREA_BYTES = 64 * 2**20

_PROBE_AREA_DIVISOR = 16
_PAGE = 4096


class Region(NamedTuple):
    """A run of bytes of a pool's memory: where it begins, and its length."""

    offset: int
    size: int


def probe_area(pool_bytes: int) -> Region:
    """The memory behind a pool of so many bytes, in the same file or allocation, from which and into which links are
    measured, so that no measurement ever sends KV. It has a sixteenth of the pool's size, and at most several payloads:
    of less memory than a pool has, a processor's cache would hold a larger share."""
    size = min(max(pool_bytes // _PROBE_AREA_DIVISOR, MAX_PROBE_BYTES), MAX_PROBE_AREA_BYTES)
    return Region(_pages(pool_bytes), _pages(size))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each layer of a group of consecutive layers caches per token: ``planes`` vectors of ``head_dim`` numbers for
    each of the model's ``num_kv_heads`` heads. Attention with keys and values has two planes; a latent that keys and
    values share (MLA) is one plane of one head. A hybrid model has several groups."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    planes: int = 2


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of one pool. ``model_hash`` identifies the weights (not the folder), ``dtype`` is the pool's (a key of
    `KV_DTYPE_BYTES`), ``caches`` describes all layers in order. The pool holds the share ``tp_rank`` of ``tp_size``
    tensor-parallel shares of each cache's heads; with fewer heads than shares, several shares hold the same head."""

    model_hash: str
    dtype: str
    block_size: int
    caches: tuple[CacheSpec, ...]
    tp_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    tp_rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    @classmethod
    def uniform(
        cls, model_hash: str, dtype: str, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> KVLayout:
        """A model whose layers all cache keys and values of the same shape, with all heads in one pool."""
        return cls(model_hash, dtype, block_size, (CacheSpec(num_layers, num_kv_heads, head_dim),))

    # --- what it holds -----------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(cache.num_layers for cache in self.caches)

    @property
    def all_layers(self) -> range:
        """Every layer of a block."""
        return range(self.num_layers)

    def heads(self, cache: CacheSpec) -> range:
        """The heads of ``cache`` that this pool holds, counted over the whole model."""
        first = self.tp_rank * cache.num_kv_heads // self.tp_size
        return range(first, max(first + 1, (self.tp_rank + 1) * cache.num_kv_heads // self.tp_size))

    def layer_bytes(self, layers: range | None = None) -> int:
        """Bytes of ``layers`` (default: all) of one block."""
        return sum(run.size for run in _runs_of_block(self, self.all_layers if layers is None else layers, self))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: ``block_size`` tokens in all layers."""
        return _block_bytes(self)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last may be partly filled)."""
        return -(-num_tokens // self.block_size)

    def expected_bytes(self, prompt_tokens: int, blocks_skipped: int = 0) -> int:
        """Bytes a hand-off of this prompt must move: whole blocks, less those decode holds already, no retries."""
        return (self.blocks_for(prompt_tokens) - blocks_skipped) * self.block_bytes

    # --- where it lies -----------------------------------------------------------------------------------------------

    def regions(
        self, block_ids: Sequence[int], num_blocks: int, layers: range | None = None, share: KVLayout | None = None
    ) -> list[Region]:
        """Where ``layers`` (default: all) of these blocks lie in a pool of ``num_blocks``, or only the heads that a
        pool of the layout ``share`` holds as well. The order is block, layer, plane, head, so that the same choice has
        the same bytes in the same order in every pool that holds it; regions that touch are one. ValueError for blocks
        or layers that are not there."""
        runs = _runs_of_block(self, self.all_layers if layers is None else layers, share or self)
        block_bytes = self.block_bytes
        found: list[Region] = []
        start = end = 0
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise ValueError(f"block {block_id} is outside the pool of {num_blocks} blocks")
            base = block_id * block_bytes
            for offset, size in runs:
                if base + offset != end:
                    if end > start:
                        found.append(Region(start, end - start))
                    start = base + offset
                end = base + offset + size
        if end > start:
            found.append(Region(start, end - start))
        return found

    # --- whether it fits ---------------------------------------------------------------------------------------------

    def check_source(self, source: KVLayout) -> None:
        """Raise `LayoutMismatch` unless each region of a block of this pool is there in a pool of the layout
        ``source``. It names the first field that differs; the number of shares may."""
        for name in ("model_hash", "dtype", "block_size"):
            _check_field(name, getattr(self, name), getattr(source, name))
        _check_field("number of caches", len(self.caches), len(source.caches))
        for mine, theirs in zip(self.caches, source.caches, strict=True):
            for name in CacheSpec.__struct_fields__:
                _check_field(name, getattr(mine, name), getattr(theirs, name))
            here, there = self.heads(mine), source.heads(theirs)
            if not there.start <= here.start < here.stop <= there.stop:
                raise LayoutMismatch(
                    f"the peer's pool holds KV heads {there.start} to {there.stop - 1} (share {source.tp_rank} of "
                    f"{source.tp_size}), and heads {here.start} to {here.stop - 1} are needed here (share "
                    f"{self.tp_rank} of {self.tp_size})"
                )


def pair_regions(ours: Sequence[Region], theirs: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Two lists of regions that have the same bytes in order, cut so that each pair has the same size. ValueError if
    the lists differ in size."""
    mine, other = iter(ours), iter(theirs)
    left = right = Region(0, 0)
    while True:
        left = left if left.size else next(mine, left)
        right = right if right.size else next(other, right)
        size = min(left.size, right.size)
        if not size:
            if left.size or right.size:
                raise ValueError("the regions differ in size")
            return
        yield Region(left.offset, size), Region(right.offset, size)
        left, right = Region(left.offset + size, left.size - size), Region(right.offset + size, right.size - size)


@lru_cache(256)
def _block_bytes(layout: KVLayout) -> int:
    return layout.layer_bytes()


@lru_cache(4096)
def _runs_of_block(layout: KVLayout, layers: range, share: KVLayout) -> tuple[Region, ...]:
    """Where ``layers`` of a block lie within the block, with the heads that ``share`` holds as well."""
    if not 0 <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise ValueError(f"layers {layers.start} to {layers.stop} of {layout.num_layers}")
    runs: list[Region] = []
    offset = layer = 0
    for cache, theirs in zip(layout.caches, share.caches, strict=True):
        held, wanted = layout.heads(cache), share.heads(theirs)
        head_bytes = layout.block_size * cache.head_dim * KV_DTYPE_BYTES[layout.dtype]
        first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
        for _ in range(cache.num_layers):
            for _ in range(cache.planes):
                start, size = offset + (first - held.start) * head_bytes, (stop - first) * head_bytes
                if layer in layers and size > 0:
                    if runs and sum(runs[-1]) == start:
                        runs[-1] = Region(runs[-1].offset, runs[-1].size + size)
                    else:
                        runs.append(Region(start, size))
                offset += len(held) * head_bytes
            layer += 1
    return tuple(runs)


def _check_field(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise LayoutMismatch(
            f"KV layout differs in {name}: {mine!r} here, {theirs!r} at the peer; "
            "all workers of a service must run the same model, dtype and block size"
        )
