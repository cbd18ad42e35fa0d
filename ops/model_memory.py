"""Memory and arithmetic of a model, calculated from its shape: `pdserve model-info` and the doctor's memory check.
Nothing here is measured. Bytes are bytes, GB are 10^9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.outline import ModelOutline
from checkpoints.shape import ModelShape
from checkpoints.source import ModelSource
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES
from pdserve.core.config import PdserveConfig
from pdserve.core.kv_layout import DTYPE_BYTES, FP8, KVLayout, probe_area
from pdserve.core.worker import Role


def kv_variants(shape: ModelShape, dtype: str) -> list[dict[str, Any]]:
    """KV bytes per token over all layers as MHA, as GQA with each group size that divides the heads, as MQA and as MLA.

    MLA is DeepSeek-V2's: one latent of 4 head dims and one shared rope key of half a head dim per layer (512 + 64
    where the head dim is 128), without the factor 2, as keys and values come from the same latent.
    """
    heads = shape.num_heads
    kinds = {"MHA": (heads, f"{heads} KV heads, one per query head")}
    for group in (g for g in range(2, heads) if heads % g == 0):
        kinds[f"GQA-{group}"] = heads // group, f"{heads // group} KV heads, each shared by {group} query heads"
    if heads > 1:
        kinds["MQA"] = 1, "1 KV head for all query heads"
    sizes = [(name, shape.kv_bytes_per_token(dtype, kv_heads), what) for name, (kv_heads, what) in kinds.items()]
    latent, rope = mla_dims(shape)
    what = f"assumed latent {latent} + rope key {rope} (DeepSeek-V2's 4 and 1/2 head dims of {shape.head_dim})"
    sizes.append(("MLA", shape.num_layers * (latent + rope) * DTYPE_BYTES[dtype], what))
    return [{"name": name, "bytes_per_token": size, "what": what} for name, size, what in sizes]


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


def fit(
    model: ModelShape | ModelOutline,
    dtype: str,
    memory_bytes: int,
    context: int,
    request_bytes: int,
    step_bytes: int = 0,
) -> dict[str, int]:
    """What ``memory_bytes`` of a device leave for KV after the weights and ``step_bytes``: in bytes, in ``tokens``, and
    in ``requests`` of ``context`` tokens, which take ``request_bytes`` each. ``devices`` of this size together hold the
    weights and one such request; pdserve does not divide a model over devices."""
    weight_bytes, token_bytes = model.weight_bytes(dtype), model.kv_bytes_per_token(dtype)
    kv_bytes = max(0, memory_bytes - step_bytes - weight_bytes)
    requests = kv_bytes // request_bytes
    return {
        "memory_bytes": memory_bytes,
        "kv_bytes": kv_bytes,
        "tokens": kv_bytes // token_bytes if token_bytes else requests * context,  # some keep a state per request alone
        "requests": requests,
        "devices": -(-(weight_bytes + request_bytes) // max(1, memory_bytes - step_bytes)),
    }


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
class ServedModel:
    """What a configuration makes of a model."""

    layout: KVLayout
    """Of the workers' pools."""
    context: int
    """Most tokens of one request: those of the configuration, else of the model."""
    # of one worker
    weight_bytes: int
    pool_bytes: int
    """0 for a GPU pool without a configured size, which takes the memory that is left."""
    activation_bytes: int
    """Of a full step that samples a token for each of its requests."""
    draft_token_bytes: int = 0
    """KV of a token in the pool of the draft model, which is a part of ``pool_bytes``."""

    @classmethod
    def of(
        cls, source: ModelSource, config: PdserveConfig, device: str, draft: ModelSource | None = None
    ) -> ServedModel:
        """``source`` on ``device`` (``cpu`` or ``cuda``), with the ``draft`` model that guesses its tokens. For the
        server of another engine, the weights are the model's files in the type of the service, divided by the server's
        GPUs, and activations count as 0."""
        engine, shape = config.engine, source.shape
        layout = layout_of(source, config, model_hash="")  # which sizes do not depend on
        dtype = _dtype_of(source, config)
        keep_fp8 = device == "cuda" and dtype == "bfloat16" and not engine.batch_invariant  # where the GPU can
        tokens = max(engine.max_num_seqs, *(engine.token_budget(device, role) for role in Role))
        draft_weight_bytes = draft_token_bytes = 0
        if draft is not None:
            draft_weight_bytes = draft.shape.weight_bytes(dtype, device == "cuda" and dtype == "bfloat16")
            draft_token_bytes = draft.shape.kv_bytes_per_token(dtype)
        if engine.num_blocks is not None:
            pool_bytes = engine.num_blocks * (layout.block_bytes + layout.block_size * draft_token_bytes)
        elif engine.kv_memory_mb is not None:
            pool_bytes = engine.kv_memory_mb * 2**20
        else:
            pool_bytes = DEFAULT_CPU_KV_BYTES if device == "cpu" else 0
        context = engine.max_model_len or shape.max_position_embeddings
        if not config.has_own_engines:
            devices = max(1, round(config.cluster.worker_resources.get("GPU", 1)))
            file_bytes = sum(path.stat().st_size for path in source.weight_files())
            weight_bytes = file_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[shape.dtype]
            if engine.num_blocks is not None:  # of a size that the server chooses, unless it is given one
                pool_bytes = pool_bytes // devices if engine.block_size else 0
            elif config.worker.engine != "vllm" and engine.kv_memory_mb is None:
                pool_bytes = 0
            return cls(layout, context, weight_bytes // devices, pool_bytes, activation_bytes=0)
        return cls(
            layout,
            context,
            shape.weight_bytes(dtype, keep_fp8) + draft_weight_bytes,
            pool_bytes,
            activation_bytes(shape, dtype, tokens, engine.max_num_seqs),
            draft_token_bytes,
        )

    @property
    def blank_bytes(self) -> int:
        """The zeros behind the pool."""
        return probe_area(self.pool_bytes).size

    @property
    def total_bytes(self) -> int:
        """Memory of one worker."""
        return self.weight_bytes + self.pool_bytes + self.blank_bytes + self.activation_bytes

    def pool_tokens(self, left_bytes: int = 0) -> int:
        """Tokens that the pool holds, or that fit into the memory that is left if it takes all of it."""
        return (self.pool_bytes or left_bytes) // (self.layout.token_bytes + self.draft_token_bytes)


def _dtype_of(source: ModelSource, config: PdserveConfig) -> str:
    return source.shape.dtype if config.model.dtype == "auto" else config.model.dtype


def layout_of(source: ModelSource, config: PdserveConfig, model_hash: str) -> KVLayout:
    """The KV layout of the workers' pools; dtype ``auto`` counts as the checkpoint's."""
    return KVLayout.uniform(
        model_hash=model_hash,
        dtype=FP8 if config.engine.kv_dtype == "fp8" else _dtype_of(source, config),
        block_size=config.engine.block_size or DEFAULT_BLOCK_SIZE,
        num_layers=source.shape.num_layers,
        num_kv_heads=source.shape.num_kv_heads,
        head_dim=source.shape.head_dim,
    )
