"""Reads a model's shape from a Hugging Face ``config.json``, with the defaults of each supported family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from checkpoints.config_fields import ConfigFields
from checkpoints.families import Family, architectures, family_of
from checkpoints.quantization import read_quantization
from checkpoints.shape import Experts, ModelShape, Rope, RopeScaling

_DEFAULT_MAX_WINDOW_LAYERS = 28
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def shape_from_hf(config: Mapping[str, Any], origin: str) -> ModelShape:
    """Parse the content of a ``config.json`` as transformers does. Raises `ModelError` with ``origin`` and the key that
    is missing, wrong or unsupported."""
    fields = ConfigFields(config, origin)
    architecture = fields.architecture()
    if architecture not in architectures():
        raise fields.error(
            f"architecture {architecture!r} is not supported; supported: {[*architectures()]}; `pdserve model-info` "
            "tells the sizes of others, which worker.engine: vllm may serve"
        )
    family = family_of(architecture)
    _refuse_unsupported(fields, family)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    num_kv_heads = family.kv_heads or num_heads
    if "num_key_value_heads" in config:
        num_kv_heads = num_heads if config["num_key_value_heads"] is None else fields.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads do not divide by {num_kv_heads} KV heads")
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    rotary_dim = _rotary_dim(fields, family, head_dim)
    rope, local_rope = _ropes(fields, family)
    _check_factors(fields, rope, rotary_dim or head_dim)
    return ModelShape(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_context(fields, rope),
        rms_norm_eps=fields.positive("rms_norm_eps", family.rms_norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
        dtype=fields.dtype(),
        eos_token_ids=_eos_token_ids(config),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, num_layers),
        qk_norm_spans_heads=family.qk_norm_spans_heads,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation="gelu_tanh" if family.activation == "gelu_pytorch_tanh" else "silu",
        local_rope=local_rope,
        partial_rotary_dim=rotary_dim,
        score_scale=None
        if family.query_pre_attn_scalar is None
        else fields.positive("query_pre_attn_scalar", family.query_pre_attn_scalar) ** -0.5,
        attention_softcap=_attention_softcap(fields, family),
        final_softcap=fields.positive_or_none("final_logit_softcapping", family.final_softcap)
        if family.softcaps
        else None,
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        experts=_experts(fields, family, num_layers),
        quantization=read_quantization(fields),
    )


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    config = fields.values
    activation = config.get(family.activation_key) or family.activation
    if activation != family.activation:
        raise fields.error(f"'{family.activation_key}' must be '{family.activation}', got {activation!r}")
    if config.get("use_mrope"):
        raise fields.error("'use_mrope' is set; rope over several axes is not supported")
    if config.get("use_bidirectional_attention"):
        raise fields.error("'use_bidirectional_attention' is set; only causal attention is supported")


def _head_dim(fields: ConfigFields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.values.get("head_dim") is not None:
        head_dim = fields.count("head_dim")
    elif family.head_dim is not None and "head_dim" not in fields.values:
        head_dim = family.head_dim
    elif hidden_size % num_heads:
        raise fields.error(
            f"'hidden_size' {hidden_size} is no multiple of {num_heads} heads and there is no 'head_dim'"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error(f"'head_dim' must be even, as rope turns pairs, got {head_dim}")
    return head_dim


def _context(fields: ConfigFields, rope: Rope) -> int:
    """The longest context. Files with yarn name either the stretched context or, as Qwen's, the original one."""
    longest = fields.count("max_position_embeddings")
    if rope.scaling.kind != "yarn":
        return longest
    return max(longest, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))


def _check_factors(fields: ConfigFields, rope: Rope, rotary_dim: int) -> None:
    for key, factors in (("short_factor", rope.scaling.short_factors), ("long_factor", rope.scaling.long_factors)):
        if rope.scaling.kind == "longrope" and len(factors) != rotary_dim // 2:
            raise fields.error(
                f"'{key}' of longrope rope scaling must have {rotary_dim // 2} numbers, one for each pair of "
                f"dimensions, got {len(factors)}"
            )


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _attention_softcap(fields: ConfigFields, family: Family) -> float | None:
    if not family.softcaps:
        return None
    softcap = fields.positive_or_none("attn_logit_softcapping", family.attention_softcap)
    if softcap is not None and family.attention_softcap is None:
        raise fields.error("'attn_logit_softcapping' is set, which this architecture ignores; set it to null")
    return softcap


def _experts(fields: ConfigFields, family: Family, num_layers: int) -> Experts | None:
    if family.experts is None:
        return None
    mixtral = family.experts == "mixtral"
    count_key = "num_local_experts" if mixtral or "num_experts" not in fields.values else "num_experts"
    count = fields.count(count_key, 8 if mixtral else 128)
    per_token = fields.count("num_experts_per_tok", 2 if mixtral else 8)
    if per_token > count:
        raise fields.error(f"'num_experts_per_tok' {per_token} exceeds '{count_key}' {count}")
    if mixtral:
        return Experts(count, per_token, fields.count("intermediate_size"))
    step = fields.count("decoder_sparse_step", 1)
    plain = fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(i, int) for i in plain):
        raise fields.error(f"'mlp_only_layers' must be a list of layer numbers, got {plain!r}")
    return Experts(
        count,
        per_token,
        fields.count("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob"),
        dense_layers=tuple(i for i in range(num_layers) if i in plain or (i + 1) % step),
    )


def _windows(fields: ConfigFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """One window or None per layer; empty if no layer has one."""
    layer_types = fields.values.get("layer_types")
    if family.window == "by_layer":
        window = _window(fields, family) if fields.flag("use_sliding_window") else None
        first = fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, least=0)
        sliding = [window is not None and i >= first for i in range(num_layers)]
    elif family.window == "pattern":
        window = _window(fields, family)
        every = family.window_pattern
        if family.window_pattern_key:
            every = fields.count(family.window_pattern_key, every)
        sliding = [bool((i + 1) % every) for i in range(num_layers)]
    else:
        window = None
        if family.window == "all" or (family.window == "used" and fields.flag("use_sliding_window")):
            window = _window(fields, family)
        sliding = [window is not None] * num_layers
    if layer_types is not None:
        named = _sliding_layers(fields, layer_types, num_layers)
        if family.window in ("by_layer", "pattern"):
            sliding = named
        elif named != sliding:
            raise fields.error("'layer_types' mixes windows in a way that this architecture does not have")
    if any(sliding) and window is None:
        hint = "'use_sliding_window' and 'sliding_window'" if family.window == "by_layer" else "'sliding_window'"
        raise fields.error(f"'layer_types' names sliding_attention, but there is no window; set {hint}")
    return tuple(window if each else None for each in sliding) if any(sliding) else ()


def _window(fields: ConfigFields, family: Family) -> int | None:
    if fields.values.get("sliding_window", family.default_window) is None:
        return None
    return fields.count("sliding_window", family.default_window)


def _sliding_layers(fields: ConfigFields, layer_types: Any, num_layers: int) -> list[bool]:
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error(f"'layer_types' must be a list of {num_layers}, one for each layer")
    for name in layer_types:
        if name not in (_FULL, _SLIDING):
            raise fields.error(f"'layer_types' names {name!r}; supported: {_FULL}, {_SLIDING}")
    return [name == _SLIDING for name in layer_types]


# --- rope -------------------------------------------------------------------------------------------------------------


def _ropes(fields: ConfigFields, family: Family) -> tuple[Rope, Rope | None]:
    """The rope of the model, and that of its layers with a window if the family has one of its own for them."""
    key, given = _rope_object(fields)
    nested = [name for name, value in given.items() if isinstance(value, Mapping)]
    if family.local_rope_theta is None:
        if nested:
            raise fields.error(f"'{key}' has settings of its own for {nested[0]!r}; all layers must have the same rope")
        return _rope(given, fields, family, family.rope_theta), None
    local_theta = fields.values.get("rope_local_base_freq") or family.local_rope_theta
    main, local = (given.get(_FULL) or {}, given.get(_SLIDING) or {}) if nested else (given, {})
    return (
        _rope(dict(main), fields, family, family.rope_theta),
        _rope({"rope_theta": local_theta, **local}, fields, family, family.local_rope_theta),
    )


def _rope_object(fields: ConfigFields) -> tuple[str, dict[str, Any]]:
    """The settings of rope, and the key that has them."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    return key, dict(fields.object(key))


def _rotary_dim(fields: ConfigFields, family: Family, head_dim: int) -> int | None:
    """The dimensions of each head that rope turns; None: all of them."""
    factor = _rope_object(fields)[1].get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if factor in (None, 1):
        return None
    if not family.partial_rope:
        raise fields.error(f"'partial_rotary_factor' {factor!r} is not supported; rope turns whole heads")
    rotary_dim = int(head_dim * fields.as_positive(factor, "'partial_rotary_factor'"))
    if rotary_dim % 2 or not 0 < rotary_dim < head_dim:
        raise fields.error(
            f"'partial_rotary_factor' {factor!r} makes rope turn {rotary_dim} of {head_dim} dimensions of a head; it "
            "must be an even number of them"
        )
    return rotary_dim


def _rope(rope: dict[str, Any], fields: ConfigFields, family: Family, theta: float) -> Rope:
    if "original_max_position_embeddings" in fields.values:
        rope["original_max_position_embeddings"] = fields.values["original_max_position_embeddings"]
    theta = fields.as_positive(rope.get("rope_theta") or fields.values.get("rope_theta") or theta, "'rope_theta'")
    return Rope(theta, _scaling(rope, fields, family))


def _scaling(rope: Mapping[str, Any], fields: ConfigFields, family: Family) -> RopeScaling:
    def need(key: str, default: float | None = None) -> float:
        return fields.as_positive(rope.get(key) or default, f"'{key}' of {kind} rope scaling")

    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family.partial_rope and kind in ("su", "yarn"):  # Phi-3's first names
        kind = "longrope"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind, need("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind,
            need("factor"),
            need("low_freq_factor"),
            need("high_freq_factor"),
            int(need("original_max_position_embeddings")),
        )
    if kind == "yarn":
        factor = need("factor")
        attention_factor = _yarn_magnitude(factor, 1.0)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention_factor = _yarn_magnitude(factor, need("mscale")) / _yarn_magnitude(factor, need("mscale_all_dim"))
        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise fields.error(f"'truncate' of yarn rope scaling must be true or false, got {truncate!r}")
        return RopeScaling(
            kind,
            factor,
            original_max_position_embeddings=int(
                need("original_max_position_embeddings", fields.count("max_position_embeddings"))
            ),
            attention_factor=need("attention_factor", attention_factor),
            beta_fast=need("beta_fast", 32.0),
            beta_slow=need("beta_slow", 1.0),
            truncate=truncate,
        )
    if kind == "longrope" and family.partial_rope:
        original = int(need("original_max_position_embeddings", 4096))
        factor = need("factor", fields.count("max_position_embeddings") / original)
        default = 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            kind,
            factor,
            original_max_position_embeddings=original,
            attention_factor=need("attention_factor", default),
            short_factors=_factors(rope, "short_factor", fields),
            long_factors=_factors(rope, "long_factor", fields),
        )
    raise fields.error(
        f"'rope_type': rope scaling {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS[:-1])} (longrope for "
        "Phi-3)"
    )


def _yarn_magnitude(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _factors(rope: Mapping[str, Any], key: str, fields: ConfigFields) -> tuple[float, ...]:
    given, what = rope.get(key), f"'{key}' of longrope rope scaling"
    if not isinstance(given, list) or not given:
        raise fields.error(f"{what} must be a list of numbers, got {given!r}")
    return tuple(fields.as_positive(value, what) for value in given)
