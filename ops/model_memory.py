"""Memory and arithmetic of a model, calculated from its shape: `pdserve model-info` and the doctor's memory check.
Nothing here is measured. Bytes are bytes, GB are 10^9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from checkpoints.outline import ModelOutline
from checkpoints.shape import ModelShape
from checkpoints.source import ModelSource
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES
from pdserve.core.config import PdserveConfig
from pdserve.core.kv_layout import DTYPE_BYTES, KVLayout, probe_area
from pdserve.core.worker import Role


class KVVariant(NamedTuple):
    """Size of the KV cache with one kind of attention, in bytes per token over all layers."""

    name: str
    bytes_per_token: int
    what: str


class Fit(NamedTuple):
    """Memory of a device that is left for KV: in bytes, in ``tokens``, and in ``requests`` of the full context.
    ``devices`` of this size together hold the weights and one request of the full context; pdserve does not divide a
    model over devices."""

    memory_bytes: int
    kv_bytes: int
    tokens: int
    requests: int
    devices: int


def kv_variants(shape: ModelShape, dtype: str) -> list[KVVariant]:
    """KV bytes per token as MHA, as GQA with each group size that divides the heads, as MQA and as MLA.

    MLA is DeepSeek-V2's: one latent of 4 head dims and one shared rope key of half a head dim per layer (512 + 64
    where the head dim is 128), without the factor 2, as keys and values come from the same latent.
    """
    heads, head_dim = shape.num_heads, shape.head_dim
    variants = [KVVariant("MHA", shape.kv_bytes_per_token(dtype, heads), f"{heads} KV heads, one per query head")]
    for group in (g for g in range(2, heads) if heads % g == 0):
        kv_heads = heads // group
        what = f"{kv_heads} KV heads, each shared by {group} query heads"
        variants.append(KVVariant(f"GQA-{group}", shape.kv_bytes_per_token(dtype, kv_heads), what))
    if heads > 1:
        variants.append(KVVariant("MQA", shape.kv_bytes_per_token(dtype, 1), "1 KV head for all query heads"))
    latent, rope = mla_dims(shape)
    mla = shape.num_layers * (latent + rope) * DTYPE_BYTES[dtype]
    what = f"assumed latent {latent} + rope key {rope} (DeepSeek-V2's 4 and 1/2 head dims of {head_dim})"
    return [*variants, KVVariant("MLA", mla, what)]


def mla_dims(shape: ModelShape) -> tuple[int, int]:
    """Latent and rope dims that MLA is assumed to have for this head dim."""
    return 4 * shape.head_dim, shape.head_dim // 2


def window_kv_bytes(shape: ModelShape, dtype: str, context: int, windows: Sequence[int | None]) -> int:
    """KV bytes of one request of ``context`` tokens if each layer kept only its window of them (None: all). ``windows``
    has one entry per layer. pdserve's pool keeps all tokens in all layers; this is what a window could save."""
    per_layer = shape.kv_bytes_per_token(dtype) // shape.num_layers
    return per_layer * sum(context if window is None else min(context, window) for window in windows)


def activation_bytes(shape: ModelShape, dtype: str, tokens: int, sampled: int = 1) -> int:
    """Peak activation bytes of one step over ``tokens`` tokens: residual and normed input, plus the larger of attention
    (q, k, v, output) and MLP (gate, up, product), plus float32 logits of ``sampled`` rows. Assumes an attention that
    never materialises its scores; excludes the allocator's slack."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = shape.intermediate_size
    if shape.experts is not None:
        inner = max(inner * bool(shape.experts.dense_layers), shape.experts.per_token * shape.experts.intermediate_size)
    widest = max(2 * q_size + 2 * kv_size, 3 * inner)
    return tokens * (2 * shape.hidden_size + widest) * DTYPE_BYTES[dtype] + sampled * shape.vocab_size * 4


def fit(shape: ModelShape, dtype: str, memory_bytes: int, tokens: int, context: int) -> Fit:
    """What is left for KV in ``memory_bytes`` after weights and the activations of a ``tokens`` budget; all zero if
    those alone do not fit."""
    left = memory_bytes - shape.weight_bytes(dtype) - activation_bytes(shape, dtype, tokens)
    kv_bytes = max(0, left)
    kv_tokens = kv_bytes // shape.kv_bytes_per_token(dtype)
    request_bytes = context * shape.kv_bytes_per_token(dtype)
    usable = max(1, memory_bytes - activation_bytes(shape, dtype, tokens))
    devices = -(-(shape.weight_bytes(dtype) + request_bytes) // usable)
    return Fit(memory_bytes, kv_bytes, kv_tokens, kv_tokens // context, devices)


def fit_outline(outline: ModelOutline, dtype: str, memory_bytes: int, context: int) -> Fit:
    """As `fit`, without activations, of which an outline knows nothing. Without a cache per token, as many tokens fit
    as the requests have."""
    kv_bytes = max(0, memory_bytes - outline.weight_bytes(dtype))
    request_bytes = outline.request_bytes(dtype, context)
    requests = kv_bytes // request_bytes
    per_token = outline.kv_bytes_per_token(dtype)
    kv_tokens = kv_bytes // per_token if per_token else requests * context
    devices = -(-(outline.weight_bytes(dtype) + request_bytes) // memory_bytes)
    return Fit(memory_bytes, kv_bytes, kv_tokens, requests, devices)


def prefill_flops_per_token(shape: ModelShape, prompt_tokens: int) -> float:
    """Mean floating-point operations per prompt token: 2 per weight of the layers' matrices (of a mixture of experts,
    those that compute the token), and causal attention over
    half the prompt or what a layer's window leaves of it (scores and values, 2 operations each); the head runs for the
    last token only."""
    weights = 2.0 * shape.num_layers * shape.active_layer_matrices
    seen = sum(_mean_seen(prompt_tokens, window) for window in shape.layer_windows)
    attention = 4.0 * shape.num_heads * shape.head_dim * seen
    head = 2.0 * shape.vocab_size * shape.hidden_size / prompt_tokens
    return weights + attention + head


def _mean_seen(prompt_tokens: int, window: int | None) -> float:
    """Mean number of tokens that a prompt token attends to, including itself."""
    seen = prompt_tokens if window is None else min(window, prompt_tokens)
    return (seen * (seen + 1) / 2 + (prompt_tokens - seen) * seen) / prompt_tokens


def phi_gbps_per_tflops(shape: ModelShape, dtype: str, prompt_tokens: int) -> float:
    """Φ = KV bytes / prefill time, in Gbit/s per TFLOP/s that prefill achieves. At this bandwidth layer-wise overlap
    hides the whole hand-off; twice the compute needs twice the bandwidth."""
    bits = 8.0 * shape.kv_bytes_per_token(dtype)
    seconds_at_one_tflops = prefill_flops_per_token(shape, prompt_tokens) / 1e12
    return bits / seconds_at_one_tflops / 1e9


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of one worker in bytes. ``pool_bytes`` is 0 for a GPU pool without a configured size, which takes the
    memory that is left."""

    weight_bytes: int
    pool_bytes: int
    activation_bytes: int

    @property
    def blank_bytes(self) -> int:
        """The zeros behind the pool."""
        return probe_area(self.pool_bytes).size

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.pool_bytes + self.blank_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a configuration makes of a model: the layout of the workers' pools, the memory of one worker, and the most
    tokens of one prompt, which the engine, the model's context and the pool limit."""

    layout: KVLayout
    need: MemoryNeed
    longest_prompt: int

    @classmethod
    def of(cls, source: ModelSource, config: PdserveConfig, device: str) -> ServedModel:
        """``source`` on ``device`` (``cpu`` or ``cuda``)."""
        layout = layout_of(source, config, model_hash="")  # which sizes do not depend on
        need = _need(source, config, layout, device)
        longest = config.engine.max_model_len or source.shape.max_position_embeddings
        in_pool = need.pool_bytes // layout.token_bytes
        return cls(layout, need, min(longest, in_pool) if need.pool_bytes else longest)


def layout_of(source: ModelSource, config: PdserveConfig, model_hash: str) -> KVLayout:
    """The KV layout of the workers' pools; dtype ``auto`` counts as the checkpoint's."""
    return KVLayout.uniform(
        model_hash=model_hash,
        dtype=source.shape.dtype if config.model.dtype == "auto" else config.model.dtype,
        block_size=config.engine.block_size or DEFAULT_BLOCK_SIZE,
        num_layers=source.shape.num_layers,
        num_kv_heads=source.shape.num_kv_heads,
        head_dim=source.shape.head_dim,
    )


def _need(source: ModelSource, config: PdserveConfig, layout: KVLayout, device: str) -> MemoryNeed:
    """Memory for weights, pool, and the activations of a full step that samples a token for each of its requests."""
    engine, dtype = config.engine, layout.dtype
    tokens = max(engine.max_num_seqs, *(engine.token_budget(device, role) for role in Role))
    if engine.num_blocks is not None:
        pool_bytes = engine.num_blocks * layout.block_bytes
    elif engine.kv_memory_mb is not None:
        pool_bytes = engine.kv_memory_mb * 2**20
    else:
        pool_bytes = DEFAULT_CPU_KV_BYTES if device == "cpu" else 0
    return MemoryNeed(
        source.shape.weight_bytes(dtype, keep_quantized=device == "cuda"),
        pool_bytes,
        activation_bytes(source.shape, dtype, tokens, engine.max_num_seqs),
    )
