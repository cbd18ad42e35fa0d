"""What one worker of a configuration needs, as the engine will ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.source import ModelSource
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES
from ops.model_memory import activation_bytes
from pdserve.core.config import PdserveConfig
from pdserve.core.kv_layout import KVLayout, probe_area


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one worker. On a GPU without a size of its own the pool takes what is left: it then counts 0."""

    weight_bytes: int
    pool_bytes: int
    activation_bytes: int

    @property
    def blank_bytes(self) -> int:
        """What lies behind the pool."""
        return probe_area(self.pool_bytes).size

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.pool_bytes + self.blank_bytes + self.activation_bytes


def layout_of(source: ModelSource, config: PdserveConfig) -> KVLayout:
    """The layout of the workers' pools, for a ``model.dtype`` that is decided (auto counts as the checkpoint's own).
    `ModelError` if the weights cannot be read."""
    return KVLayout.uniform(
        model_hash=source.model_hash(),
        dtype=source.shape.dtype if config.model.dtype == "auto" else config.model.dtype,
        block_size=config.engine.block_size or DEFAULT_BLOCK_SIZE,
        num_layers=source.shape.num_layers,
        num_kv_heads=source.shape.num_kv_heads,
        head_dim=source.shape.head_dim,
    )


def need_of(source: ModelSource, config: PdserveConfig, layout: KVLayout, device: str) -> MemoryNeed:
    """Counted: weights, pool, and the activations of a full step that samples a token for each of its requests."""
    engine, dtype = config.engine, layout.dtype
    tokens = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    if engine.num_blocks is not None:
        pool_bytes = engine.num_blocks * layout.block_bytes
    elif engine.kv_memory_mb is not None:
        pool_bytes = engine.kv_memory_mb * 2**20
    else:
        pool_bytes = DEFAULT_CPU_KV_BYTES if device == "cpu" else 0
    return MemoryNeed(
        source.shape.weight_bytes(dtype),
        pool_bytes,
        activation_bytes(source.shape, dtype, tokens, engine.max_num_seqs),
    )


def longest_prompt(source: ModelSource, config: PdserveConfig, layout: KVLayout, device: str) -> int:
    """The tokens that a request may have: the engine's limit, or the model's context, or what the pool holds."""
    longest = config.engine.max_model_len or source.shape.max_position_embeddings
    pool_bytes = need_of(source, config, layout, device).pool_bytes
    return min(longest, pool_bytes // layout.token_bytes) if pool_bytes else longest
