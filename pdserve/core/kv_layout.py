"""The shape of the KV cache, as arithmetic: what a block holds, what a hand-off must weigh, whether two pools agree.

A block holds ``block_size`` tokens of *all* layers, contiguously: ``[layers, 2, kv_heads, block_size, head_dim]``
(2 = K, V). So a block travels as one run of bytes, and one layer of a block as one shorter run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.core.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_PROBE_BYTES = 8 * 2**20
"""The largest payload that a link is measured with."""
MAX_BLANK_BYTES = 64 * 2**20

_BLANK_DIVISOR = 16
_PAGE = 4096


def blank_memory(pool_bytes: int) -> tuple[int, int]:
    """Offset and size of what lies behind a pool of so many bytes, in the same file or allocation: zeros, always. Links
    are measured with them, so that no measurement ever sends KV. They are a sixteenth of the pool, and some payloads
    at most: of less memory than a pool has, a processor's cache would hold more than it holds of the pool."""
    size = min(max(pool_bytes // _BLANK_DIVISOR, MAX_PROBE_BYTES), MAX_BLANK_BYTES)
    return _pages(pool_bytes), _pages(size)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two workers must agree on before blocks may travel between them.

    ``model_hash`` identifies the weights (not the folder), ``dtype`` is the pool's (a key of `DTYPE_BYTES`).
    """

    model_hash: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of ``block_size`` tokens in all layers."""
        return self.token_bytes * self.block_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        return self.block_bytes // self.num_layers

    def byte_runs(self, block_ids: Sequence[int], layers: range, num_blocks: int) -> list[tuple[int, int]]:
        """Where ``layers`` of these blocks lie in a pool of ``num_blocks``: ``(offset, bytes)``, in the order of the
        blocks, stretches that touch as one. ValueError for blocks or layers that are not there."""
        if not 0 <= layers.start < layers.stop <= self.num_layers or layers.step != 1:
            raise ValueError(f"layers {layers.start} to {layers.stop} of {self.num_layers}")
        size, first = len(layers) * self.layer_bytes, layers.start * self.layer_bytes
        runs: list[tuple[int, int]] = []
        start = end = -1
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise ValueError(f"block {block_id} is outside the pool of {num_blocks} blocks")
            offset = block_id * self.block_bytes + first
            if offset != end:
                if end >= 0:
                    runs.append((start, end - start))
                start = offset
            end = offset + size
        if end >= 0:
            runs.append((start, end - start))
        return runs

    @property
    def all_layers(self) -> range:
        """Every layer of a block."""
        return range(self.num_layers)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last may be partly filled)."""
        return -(-num_tokens // self.block_size)

    def expected_bytes(self, prompt_tokens: int, blocks_skipped: int = 0) -> int:
        """Bytes a hand-off of this prompt must move: whole blocks, less those decode holds already, no retries."""
        return (self.blocks_for(prompt_tokens) - blocks_skipped) * self.block_bytes

    def check_compatible(self, other: KVLayout) -> None:
        """Raise `LayoutMismatch` naming the first field in which ``other`` differs."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise LayoutMismatch(
                    f"KV layout differs in {name}: {mine!r} here, {theirs!r} at the peer; "
                    "all workers of a service must run the same model, dtype and block size"
                )
