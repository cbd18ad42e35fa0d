"""Sizes of models that the engine does not serve, from ``config.json`` alone. Does not import torch.

`pdserve model-info` prints them: other kinds of attention have caches of other sizes. GPT-2, DeepSeek (MLA), Jamba,
Qwen3-Next, Mamba and Mamba 2 are counted as transformers builds them. Other decoders with attention are counted like a
Llama of their shape, so that their parameters are an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoints.config_fields import ConfigFields
from checkpoints.families import architectures
from checkpoints.shape import ModelShape, RopeScaling
from pdserve.core.kv_layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model in numbers."""

    architecture: str
    attention: str  # the kind of attention, in words
    num_layers: int
    kv_layers: int  # the layers that cache something of each token
    kv_numbers: int  # what all layers cache of one token, in numbers of the model's dtype
    state_numbers: int  # what they keep of one request, whatever its length (recurrent layers)
    num_parameters: int
    max_position_embeddings: int | None
    dtype: str
    exact: bool = True  # whether ``num_parameters`` is a count, or an estimate

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's cache in all layers."""
        return self.kv_numbers * DTYPE_BYTES[dtype]

    def request_bytes(self, dtype: str, tokens: int) -> int:
        """Bytes of the cache and the state of a request of ``tokens`` tokens."""
        return (self.kv_numbers * tokens + self.state_numbers) * DTYPE_BYTES[dtype]


_Sizes = tuple[str, int, int, int, int]
"""What a reader finds: ``attention``, ``kv_layers``, ``kv_numbers`` and ``state_numbers`` of a `ModelOutline`, and the
parameters of the layers."""


def is_served(config: Mapping[str, Any]) -> bool:
    """Whether the engine serves the architecture of ``config``."""
    return ConfigFields(config, "").architecture() in architectures()


def outline_from_hf(config: Mapping[str, Any], origin: str) -> ModelOutline:
    """The sizes of the model of a ``config.json``, served or not. `ModelError` with ``origin`` and the key if one that
    is needed is missing or wrong. Of a model with several parts (``text_config``) the decoder of text counts."""
    architecture, fields = ConfigFields(config, origin).architecture(), _text_fields(config, origin)
    if architecture == "GPT2LMHeadModel":
        return _gpt2(fields, architecture)
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    tied_by_default = architecture in ("MambaForCausalLM", "FalconMambaForCausalLM")
    reader = _READERS.get(architecture, _like_llama)
    attention, kv_layers, kv_numbers, state_numbers, layer_parameters = reader(fields, hidden)
    context = fields.values.get("max_position_embeddings")
    return ModelOutline(
        architecture=architecture,
        attention=attention,
        num_layers=fields.count("num_hidden_layers"),
        kv_layers=kv_layers,
        kv_numbers=kv_numbers,
        state_numbers=state_numbers,
        num_parameters=vocabulary * hidden * (1 if fields.flag("tie_word_embeddings", tied_by_default) else 2)
        + layer_parameters
        + hidden,
        max_position_embeddings=None if context is None else fields.count("max_position_embeddings"),
        dtype=fields.dtype(),
        exact=reader is not _like_llama,
    )


def _text_fields(config: Mapping[str, Any], origin: str) -> ConfigFields:
    """The fields of the decoder of text."""
    nested = config.get("text_config")
    return ConfigFields(nested if isinstance(nested, Mapping) else config, origin)


def outlined_shape(config: Mapping[str, Any], origin: str) -> ModelShape:
    """The shape of a model that another engine serves, as far as pdserve's gateway needs one: the vocabulary, the
    context, and a cache with as many bytes per token, as if each layer that caches had a single KV head. `ModelError`
    as for `outline_from_hf`."""
    outline, fields = outline_from_hf(config, origin), _text_fields(config, origin)
    if not outline.kv_numbers or outline.max_position_embeddings is None:
        raise fields.error(f"pdserve cannot tell the context or the cache of a {outline.architecture}")
    gpt2 = outline.architecture == "GPT2LMHeadModel"
    hidden = fields.count("n_embd", 768) if gpt2 else fields.count("hidden_size")
    eos = fields.values.get("eos_token_id", config.get("eos_token_id"))
    return ModelShape(
        architecture=outline.architecture,
        vocab_size=fields.count("vocab_size", 50_257) if gpt2 else fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=outline.kv_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=outline.kv_numbers // (2 * outline.kv_layers),
        max_position_embeddings=outline.max_position_embeddings,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(),
        tie_word_embeddings=False,
        dtype=outline.dtype,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _gpt2(fields: ConfigFields, architecture: str) -> ModelOutline:
    hidden, layers = fields.count("n_embd", 768), fields.count("n_layer", 12)
    context = fields.count("n_positions", 1024)
    inner = 4 * hidden if fields.values.get("n_inner") is None else fields.count("n_inner")
    layer = hidden * (4 * hidden + 4) + 2 * hidden * inner + inner + hidden + 4 * hidden
    return ModelOutline(
        architecture=architecture,
        attention="MHA",
        num_layers=layers,
        kv_layers=layers,
        kv_numbers=2 * layers * hidden,
        state_numbers=0,
        num_parameters=(fields.count("vocab_size", 50_257) + context) * hidden + layers * layer + 2 * hidden,
        max_position_embeddings=context,
        dtype=fields.dtype(),
    )


def _deepseek(fields: ConfigFields, hidden: int) -> _Sizes:
    """Multi-head latent attention: a token's cache is one latent and one rope key per layer."""
    layers, heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
    latent, rope = fields.count("kv_lora_rank", 512), fields.count("qk_rope_head_dim", 64)
    content, value = fields.count("qk_nope_head_dim", 128), fields.count("v_head_dim", 128)
    attention = hidden * (latent + rope) + latent + latent * heads * (content + value) + heads * value * hidden
    if fields.values.get("q_lora_rank") is None:
        attention += hidden * heads * (content + rope)
    else:
        rank = fields.count("q_lora_rank")
        attention += hidden * rank + rank + rank * heads * (content + rope)
    inner = fields.count("moe_intermediate_size", 2048)
    routed = fields.values.get("n_routed_experts") or 0
    shared = fields.values.get("n_shared_experts") or 0
    dense = min(layers, fields.count("first_k_dense_replace", 0, least=0)) if routed else layers
    experts = hidden * routed + 3 * hidden * inner * (routed + shared)
    mlps = dense * 3 * hidden * fields.count("intermediate_size") + (layers - dense) * experts
    return (
        f"MLA: a latent of {latent} and a rope key of {rope} per layer",
        layers,
        layers * (latent + rope),
        0,
        layers * (attention + 2 * hidden) + mlps,
    )


def _jamba(fields: ConfigFields, hidden: int) -> _Sizes:
    layers, state = fields.count("num_hidden_layers"), fields.count("mamba_d_state", 16)
    period, offset = fields.count("attn_layer_period", 8), fields.count("attn_layer_offset", 4, least=0)
    expert_period, expert_offset = fields.count("expert_layer_period", 2), fields.count("expert_layer_offset", 1, 0)
    heads, kv_heads, head_dim = _heads(fields, hidden)
    attending = sum(i % period == offset for i in range(layers))
    inner, kernel = fields.count("mamba_expand", 2) * hidden, fields.count("mamba_d_conv", 4)
    rank = -(-hidden // 16) if fields.values.get("mamba_dt_rank", "auto") == "auto" else fields.count("mamba_dt_rank")
    mixer = _mamba_mixer(
        hidden, inner, state, kernel, rank, fields.flag("mamba_conv_bias", True), fields.flag("mamba_proj_bias")
    )
    mixer += rank + 2 * state  # its norms
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    mlp, experts = 3 * hidden * fields.count("intermediate_size"), fields.count("num_experts", 16)
    mixed = sum(i % expert_period == expert_offset for i in range(layers)) if experts > 1 else 0
    return (
        f"hybrid: attention ({_kind(heads, kv_heads)}) in {attending} of {layers} layers, Mamba in the others",
        attending,
        2 * attending * kv_heads * head_dim,
        (layers - attending) * inner * (kernel - 1 + state),
        attending * attention
        + (layers - attending) * mixer
        + mixed * experts * (mlp + hidden)
        + (layers - mixed) * mlp
        + layers * 2 * hidden,
    )


def _qwen3_next(fields: ConfigFields, hidden: int) -> _Sizes:
    layers, interval = fields.count("num_hidden_layers"), fields.count("full_attention_interval", 4)
    kinds = fields.values.get("layer_types")
    attending = sum(kind == "full_attention" for kind in kinds) if isinstance(kinds, list) else layers // interval
    heads, kv_heads, head_dim = _heads(fields, hidden, default_head_dim=256)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads + heads) + 2 * head_dim
    key_dim, value_dim = fields.count("linear_key_head_dim", 128), fields.count("linear_value_head_dim", 128)
    values = fields.count("linear_num_value_heads", 32)
    all_keys, all_values = fields.count("linear_num_key_heads", 16) * key_dim, values * value_dim
    kernel = fields.count("linear_conv_kernel_dim", 4)
    mixed = 2 * all_keys + all_values
    mixer = hidden * (mixed + all_values + 2 * values) + mixed * kernel + 2 * values + value_dim + all_values * hidden
    experts, inner = fields.count("num_experts", 512, least=0), fields.count("moe_intermediate_size", 512)
    sparse = hidden * (experts + 1) + 3 * hidden * inner * experts
    sparse += 3 * hidden * fields.count("shared_expert_intermediate_size", 512)
    step, plain = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    routed = sum(i not in plain and (i + 1) % step == 0 for i in range(layers)) if experts else 0
    return (
        f"hybrid: attention ({_kind(heads, kv_heads)}) in {attending} of {layers} layers, gated delta rule in the "
        "others",
        attending,
        2 * attending * kv_heads * head_dim,
        (layers - attending) * (mixed * (kernel - 1) + values * key_dim * value_dim),
        attending * attention
        + (layers - attending) * mixer
        + routed * sparse
        + (layers - routed) * 3 * hidden * fields.count("intermediate_size", 5632)
        + layers * 2 * hidden,
    )


def _mamba(fields: ConfigFields, hidden: int) -> _Sizes:
    layers, state, kernel = (fields.count(key) for key in ("num_hidden_layers", "state_size", "conv_kernel"))
    inner = fields.count("expand", 2) * hidden
    rank = fields.values.get("time_step_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else fields.count("time_step_rank")
    biases = fields.flag("use_conv_bias", True), fields.flag("use_bias")
    mixer = _mamba_mixer(hidden, inner, state, kernel, rank, *biases)
    return (
        "none: Mamba layers keep a state of one size per request",
        0,
        0,
        layers * inner * (kernel - 1 + state),
        layers * (mixer + hidden),
    )


def _mamba2(fields: ConfigFields, hidden: int) -> _Sizes:
    layers, state, kernel = (fields.count(key) for key in ("num_hidden_layers", "state_size", "conv_kernel"))
    heads, head_dim = fields.count("num_heads", 128), fields.count("head_dim", 64)
    inner, groups = fields.count("expand", 2) * hidden, fields.count("n_groups", 8)
    mixed = inner + 2 * groups * state
    bias = fields.flag("use_bias")
    into = inner + mixed + heads
    mixer = (hidden + bias) * into + mixed * (kernel + fields.flag("use_conv_bias", True)) + 3 * heads + inner
    mixer += (inner + bias) * hidden
    return (
        "none: Mamba 2 layers keep a state of one size per request",
        0,
        0,
        layers * (mixed * (kernel - 1) + heads * head_dim * state),
        layers * (mixer + hidden),
    )


def _like_llama(fields: ConfigFields, hidden: int) -> _Sizes:
    """Attention as its fields say, and an MLP as a Llama has it, or experts."""
    layers = fields.count("num_hidden_layers")
    heads, kv_heads, head_dim = _heads(fields, hidden)
    kinds = fields.values.get("layer_types")
    attending = layers
    if isinstance(kinds, list):
        attending = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((fields.count(name) for name in names if fields.values.get(name)), 1)
    own = experts > 1 and fields.values.get("moe_intermediate_size") is not None
    inner = fields.count("moe_intermediate_size" if own else "intermediate_size", 4 * hidden)
    kind = _kind(heads, kv_heads)
    return (
        kind if attending == layers else f"hybrid: attention ({kind}) in {attending} of {layers} layers",
        attending,
        2 * attending * kv_heads * head_dim,
        0,
        layers * (2 * hidden * (heads + kv_heads) * head_dim + experts * 3 * hidden * inner + 2 * hidden),
    )


def _heads(fields: ConfigFields, hidden: int, default_head_dim: int | None = None) -> tuple[int, int, int]:
    """Query heads, KV heads, and numbers of a head."""
    heads = fields.count("num_attention_heads")
    kv_heads = heads if fields.values.get("num_key_value_heads") is None else fields.count("num_key_value_heads")
    if fields.values.get("head_dim") is None:
        return heads, kv_heads, default_head_dim or hidden // heads
    return heads, kv_heads, fields.count("head_dim")


def _kind(heads: int, kv_heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def _mamba_mixer(hidden: int, inner: int, state: int, kernel: int, rank: int, conv_bias: bool, proj_bias: bool) -> int:
    projections = (hidden + proj_bias) * 2 * inner + (inner + proj_bias) * hidden
    steps = inner * (rank + 2 * state) + (rank + 1) * inner
    return projections + steps + inner * (kernel + conv_bias) + inner * state + inner


_READERS: dict[str, Callable[[ConfigFields, int], _Sizes]] = {
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "FalconMambaForCausalLM": _mamba,
    "JambaForCausalLM": _jamba,
    "Mamba2ForCausalLM": _mamba2,
    "MambaForCausalLM": _mamba,
    "Qwen3NextForCausalLM": _qwen3_next,
}
