"""The architectures that the engine serves: their constants, and their defaults for fields of ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from checkpoints.shape import Norms
from pdserve.core import plugins


@dataclass(frozen=True, slots=True)
class Family:
    """Constants of an architecture, and its defaults for keys that are missing (not null) in ``config.json``."""

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    norms: Norms = "before"
    norm_offset: float = 0.0
    rms_norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    tied: bool = False
    # which layers have a sliding window. ``none``; ``all``; ``used`` (all if ``use_sliding_window``); ``by_layer`` (as
    # ``layer_types`` and ``max_window_layers`` specify); ``pattern`` (as ``layer_types`` specifies; by default all but
    # every ``window_pattern``-th).
    window: Literal["none", "all", "used", "by_layer", "pattern"] = "none"
    default_window: int | None = 4096
    window_pattern: int = 0
    window_pattern_key: str = ""  # the field that overrides it
    rope_theta: float = 1e4
    local_rope_theta: float | None = None  # of layers with a window, if they have a rope of their own
    partial_rope: bool = False  # rope may turn a part of each head only
    scales_embedding: bool = False
    query_pre_attn_scalar: int | None = None  # None: scores are scaled by the head dim
    attention_softcap: float | None = None
    final_softcap: float | None = None
    softcaps: bool = False  # whether it reads the two
    fused_projections: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    experts: Literal["mixtral", "qwen3_moe"] | None = None  # the kind of its mixture of experts, if it has one

    def modules(self, has_experts: bool) -> dict[str, tuple[str, ...]]:
        """The names of the matrices of a layer, by the part that holds them. Of experts those of the first, instead of
        all."""
        parts: dict[str, tuple[str, ...]] = {
            "qkv": tuple(f"self_attn.{name}_proj" for name in "qkv"),
            "out": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        if self.fused_projections:
            parts |= {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
        if has_experts and self.experts == "mixtral":
            expert = "block_sparse_moe.experts.0"
            parts |= {"gate_up": (f"{expert}.w1", f"{expert}.w3"), "down": (f"{expert}.w2",)}
        elif has_experts:
            expert = "mlp.experts.0"
            parts |= {"gate_up": (f"{expert}.gate_proj", f"{expert}.up_proj"), "down": (f"{expert}.down_proj",)}
        return parts


_GEMMA = Family(
    head_dim=256, kv_heads=4, reads_attention_bias=True, norms="around", norm_offset=1.0,
    activation_key="hidden_activation", activation="gelu_pytorch_tanh", tied=True, window="pattern",
    scales_embedding=True, query_pre_attn_scalar=256, softcaps=True,
)  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(kv_heads=8, window="all"),
    "Qwen2ForCausalLM": Family(kv_heads=32, qkv_bias=True, window="by_layer"),
    "Qwen3ForCausalLM": Family(
        kv_heads=32, head_dim=128, reads_attention_bias=True, qk_norm=True, window="by_layer"
    ),
    "Gemma2ForCausalLM": replace(_GEMMA, window_pattern=2, attention_softcap=50.0, final_softcap=30.0),
    "Gemma3ForCausalLM": replace(
        _GEMMA, window_pattern=6, window_pattern_key="sliding_window_pattern", qk_norm=True, rope_theta=1e6,
        local_rope_theta=1e4,
    ),
    "Phi3ForCausalLM": Family(
        rms_norm_eps=1e-5, window="all", default_window=None, partial_rope=True, fused_projections=True
    ),
    "Olmo2ForCausalLM": Family(
        reads_attention_bias=True, qk_norm=True, qk_norm_spans_heads=True, norms="after", rms_norm_eps=1e-5
    ),
    "MixtralForCausalLM": Family(
        kv_heads=8, rms_norm_eps=1e-5, window="all", default_window=None, rope_theta=1e6, experts="mixtral"
    ),
    "Qwen3MoeForCausalLM": Family(
        kv_heads=4, reads_attention_bias=True, qk_norm=True, window="used", experts="qwen3_moe"
    ),
}  # fmt: skip
"""pdserve's own, by their architecture. Plug-ins add others."""


def architectures() -> tuple[str, ...]:
    """The architectures that the engine serves."""
    return plugins.names(plugins.MODEL_FAMILIES, FAMILIES)


def family_of(architecture: str) -> Family:
    """The family of one of `architectures`. ConfigError if it is a plug-in that cannot be loaded."""
    found: Family = FAMILIES.get(architecture) or plugins.load(plugins.MODEL_FAMILIES, architecture, Family)
    return found
