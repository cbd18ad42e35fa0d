"""The shape of the KV cache, as arithmetic: what a block holds, where it lies, what a hand-off must weigh, and whether
one pool's blocks can be copied into another's.

A block holds ``block_size`` tokens of *all* layers, contiguously. Layers follow each other; one layer of a block is
``[planes, kv_heads, block_size, head_dim]``, where the planes are keys and values. So a block travels as one run of
bytes, and one layer of a block as one shorter run. The ranks of a tensor-parallel engine share the blocks of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

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


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, cache_hash=True):
    """The layout of one pool. ``model_hash`` identifies the weights (not the folder), ``dtype`` is the pool's (a key of
    `KV_DTYPE_BYTES`), ``caches`` describes all layers in order."""

    model_hash: str
    dtype: str
    block_size: int
    caches: tuple[CacheSpec, ...]

    @classmethod
    def uniform(
        cls, model_hash: str, dtype: str, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> KVLayout:
        """A model whose layers all cache keys and values of the same shape."""
        return cls(model_hash, dtype, block_size, (CacheSpec(num_layers, num_kv_heads, head_dim),))

    # --- what it holds -----------------------------------------------------------------------------------------------

    @cached_property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(cache.num_layers for cache in self.caches)

    @cached_property
    def all_layers(self) -> range:
        """Every layer of a block."""
        return range(self.num_layers)

    def layer_bytes(self, layers: range | None = None) -> int:
        """Bytes of ``layers`` (default: all) of one block."""
        return _run_of_block(self, self.all_layers if layers is None else layers).size

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: ``block_size`` tokens in all layers."""
        return self.layer_bytes()

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

    def regions(self, block_ids: Sequence[int], num_blocks: int, layers: range | None = None) -> list[Region]:
        """Where ``layers`` (default: all) of these blocks lie in a pool of ``num_blocks``. Regions that touch are one.
        ValueError for blocks or layers that are not there."""
        offset, size = _run_of_block(self, self.all_layers if layers is None else layers)
        block_bytes = self.block_bytes
        found: list[Region] = []
        start = end = 0
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise ValueError(f"block {block_id} is outside the pool of {num_blocks} blocks")
            begin = block_id * block_bytes + offset
            if begin != end:
                if end > start:
                    found.append(Region(start, end - start))
                start = begin
            end = begin + size
        if end > start:
            found.append(Region(start, end - start))
        return found

    # --- whether it fits ---------------------------------------------------------------------------------------------

    def check_source(self, source: KVLayout) -> None:
        """Raise `LayoutMismatch`, with the first field that differs, unless a block of a pool of the layout ``source``
        fits into one of this pool."""
        for name in ("model_hash", "dtype", "block_size"):
            _check_field(name, getattr(self, name), getattr(source, name))
        _check_field("number of caches", len(self.caches), len(source.caches))
        for mine, theirs in zip(self.caches, source.caches, strict=True):
            for name in CacheSpec.__struct_fields__:
                _check_field(name, getattr(mine, name), getattr(theirs, name))


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


@lru_cache(4096)
def _run_of_block(layout: KVLayout, layers: range) -> Region:
    """Where ``layers`` of a block lie within the block."""
    if not 0 <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise ValueError(f"layers {layers.start} to {layers.stop} of {layout.num_layers}")
    ends = [0]
    for cache in layout.caches:
        numbers = cache.planes * cache.num_kv_heads * layout.block_size * cache.head_dim
        ends += [ends[-1] + (each + 1) * numbers * KV_DTYPE_BYTES[layout.dtype] for each in range(cache.num_layers)]
    return Region(ends[layers.start], ends[layers.stop] - ends[layers.start])


def _check_field(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise LayoutMismatch(
            f"KV layout differs in {name}: {mine!r} here, {theirs!r} at the peer; "
            "all workers of a service must run the same model, dtype and block size"
        )
