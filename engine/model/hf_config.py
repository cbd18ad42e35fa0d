"""Reads a model's shape from a Hugging Face ``config.json``, with the defaults of each supported family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.model.shape import ModelShape, RopeScaling
from pdserve.core.errors import ModelError
from pdserve.core.kv_layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class _Family:
    """Constants of an architecture, and its defaults for keys that are missing (not null) in ``config.json``.

    ``window``: sliding windows in no layer, in all layers, or as ``layer_types`` and ``max_window_layers`` specify.
    """

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "all", "by_layer"] = "none"


FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(kv_heads=8, window="all"),
    "Qwen2ForCausalLM": _Family(kv_heads=32, qkv_bias=True, window="by_layer"),
    "Qwen3ForCausalLM": _Family(
        kv_heads=32, head_dim=128, reads_attention_bias=True, qk_norm=True, window="by_layer"
    ),
}  # fmt: skip

_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def shape_from_hf(config: Mapping[str, Any], origin: str) -> ModelShape:
    """Parse the content of a ``config.json`` as transformers does. Raises `ModelError` with ``origin`` and the key that
    is missing, wrong or unsupported."""
    architecture = (config.get("architectures") or ["?"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"{origin}: architecture {architecture!r} is not supported; supported: {list(FAMILIES)}")
    _refuse_unsupported(config, origin)
    hidden_size = _count(config, "hidden_size", origin)
    num_heads = _count(config, "num_attention_heads", origin)
    num_layers = _count(config, "num_hidden_layers", origin)
    num_kv_heads = family.kv_heads or num_heads
    if "num_key_value_heads" in config:
        num_kv_heads = num_heads if config["num_key_value_heads"] is None else _count(
            config, "num_key_value_heads", origin
        )  # fmt: skip
    if num_heads % num_kv_heads:
        raise ModelError(f"{origin}: {num_heads} attention heads do not divide by {num_kv_heads} KV heads")
    attention_bias = family.reads_attention_bias and _flag(config, "attention_bias", origin)
    rope = _rope_parameters(config, origin)
    return ModelShape(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size", origin),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, hidden_size, num_heads, origin),
        max_position_embeddings=_count(config, "max_position_embeddings", origin),
        rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "'rms_norm_eps'", origin),
        rope_theta=_positive(rope.get("rope_theta") or config.get("rope_theta") or 1e4, "'rope_theta'", origin),
        rope_scaling=_rope_scaling(rope, origin),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", origin),
        dtype=_dtype(config, origin),
        eos_token_ids=_eos_token_ids(config),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and _flag(config, "mlp_bias", origin),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, num_layers, origin),
    )


def _refuse_unsupported(config: Mapping[str, Any], origin: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{origin}: 'hidden_act' must be 'silu', got {config['hidden_act']!r}")
    if config.get("quantization_config"):
        raise ModelError(
            f"{origin}: 'quantization_config' is set; quantized checkpoints are not supported; use the model's "
            "float32, bfloat16 or float16 weights"
        )
    if config.get("use_mrope"):
        raise ModelError(f"{origin}: 'use_mrope' is set; rope over several axes is not supported")


def _count(config: Mapping[str, Any], key: str, origin: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive whole number" if least else "a whole number of 0 or more"
        raise ModelError(f"{origin}: '{key}' must be {wanted}, got {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str, origin: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{origin}: '{key}' must be true or false, got {value!r}")
    return bool(value)


def _positive(value: Any, what: str, origin: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{origin}: {what} must be a positive number, got {value!r}")
    return float(value)


def _head_dim(config: Mapping[str, Any], family: _Family, hidden_size: int, num_heads: int, origin: str) -> int:
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim", origin)
    elif family.head_dim is not None and "head_dim" not in config:
        head_dim = family.head_dim
    elif hidden_size % num_heads:
        raise ModelError(
            f"{origin}: 'hidden_size' {hidden_size} is no multiple of {num_heads} heads and there is no 'head_dim'"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{origin}: 'head_dim' must be even, as rope turns pairs, got {head_dim}")
    return head_dim


def _dtype(config: Mapping[str, Any], origin: str) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{origin}: dtype {dtype!r} is not supported; supported: {sorted(DTYPE_BYTES)}")
    return dtype


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int, origin: str) -> tuple[int | None, ...]:
    """One window or None per layer; empty if no layer has one."""
    layer_types = config.get("layer_types")
    if family.window == "by_layer":
        window = _window(config, origin) if _flag(config, "use_sliding_window", origin) else None
        if layer_types is None:
            first = _DEFAULT_MAX_WINDOW_LAYERS
            if "max_window_layers" in config:
                first = _count(config, "max_window_layers", origin, least=0)
            windows = [window if i >= first else None for i in range(num_layers)]
        else:
            windows = [window if sliding else None for sliding in _sliding_layers(layer_types, num_layers, origin)]
            if window is None and "sliding_attention" in layer_types:
                raise ModelError(
                    f"{origin}: 'layer_types' names sliding_attention, but there is no window; set "
                    "'use_sliding_window' and 'sliding_window'"
                )
    else:
        window = _window(config, origin) if family.window == "all" else None
        if (
            layer_types is not None
            and _sliding_layers(layer_types, num_layers, origin) != [window is not None] * num_layers
        ):
            raise ModelError(f"{origin}: 'layer_types' mixes windows in a way that this architecture does not have")
        windows = [window] * num_layers
    return () if all(w is None for w in windows) else tuple(windows)


def _window(config: Mapping[str, Any], origin: str) -> int | None:
    if config.get("sliding_window", _DEFAULT_WINDOW) is None:
        return None
    return _count({"sliding_window": _DEFAULT_WINDOW, **config}, "sliding_window", origin)


def _sliding_layers(layer_types: Any, num_layers: int, origin: str) -> list[bool]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"{origin}: 'layer_types' must be a list of {num_layers}, one for each layer")
    for name in layer_types:
        if name not in known:
            raise ModelError(f"{origin}: 'layer_types' names {name!r}; supported: {', '.join(known)}")
    return [name == "sliding_attention" for name in layer_types]


def _rope_parameters(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The rope settings of old files (``rope_scaling``) or new files (``rope_parameters``)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{origin}: '{key}' must be an object, got {given!r}")
    rope = dict(given)
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(
            f"{origin}: '{key}' has settings of its own for {nested[0]!r}; all layers must have the same rope"
        )
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if factor not in (None, 1):
        raise ModelError(f"{origin}: 'partial_rotary_factor' {factor!r} is not supported; rope turns whole heads")
    if "original_max_position_embeddings" in config:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def _rope_scaling(rope: Mapping[str, Any], origin: str) -> RopeScaling:
    def need(key: str) -> float:
        return _positive(rope.get(key), f"'{key}' of {kind} rope scaling", origin)

    kind = rope.get("rope_type") or rope.get("type") or "default"
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
    raise ModelError(
        f"{origin}: 'rope_type': rope scaling {kind!r} is not supported; supported: default, linear, llama3"
    )
