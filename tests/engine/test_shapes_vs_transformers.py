"""Shapes read from ``config.json`` against transformers' own config classes and parameter counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints.hf_config import shape_from_hf
from checkpoints.shape import Rope

PLAIN: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "max_position_embeddings": 256,
}
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
MORE: dict[str, dict[str, Any]] = {
    "as_it_is": {},
    "few_kv_heads": {"num_key_value_heads": 4},
    "null_kv_heads": {"num_key_value_heads": None},
    "own_head_dim": {"head_dim": 6},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "window_by_default": {"use_sliding_window": True, "max_window_layers": 2},
    "window_off": {"sliding_window": None, "use_sliding_window": False},
    "old_rope": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "new_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
}


SMALL = PLAIN | {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {"model_type": "gemma2"},
    "Gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9},
    "Phi3": {"model_type": "phi3", "pad_token_id": None, "sliding_window": 7},
    "Olmo2": {"model_type": "olmo2", "attention_bias": True},
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 3},
    "Qwen3Moe": {
        "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 24, "decoder_sparse_step": 2,
        "moe_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 11,
    },
}  # fmt: skip
CONFIGS = [
    {"architectures": [f"{name}ForCausalLM"], "model_type": family, **PLAIN, **more}
    for family, name in FAMILIES.items()
    for key, more in MORE.items()
    if family in ("llama", "qwen2") or "window" in key  # mistral and qwen3 differ from them in windows
] + [{"architectures": [f"{name}ForCausalLM"], **SMALL, **more} for name, more in MORE_FAMILIES.items()]


@pytest.mark.parametrize("given", CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_is_read_like_transformers_reads_it(given: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    # What they write back has all defaults filled in: the sparse file and the full one must mean the same.
    full = json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": given["architectures"]}
    for config in (given, full):
        shape = shape_from_hf(config, "m")
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        layer = model.model.layers[0]
        attention = layer.self_attn
        assert (shape.head_dim, shape.num_kv_heads) == (attention.head_dim, theirs.num_key_value_heads)
        assert shape.attention_scale == attention.scaling
        assert shape.rms_norm_eps == theirs.rms_norm_eps
        assert shape.tie_word_embeddings is theirs.tie_word_embeddings
        assert shape.attention_softcap == getattr(attention, "attn_logit_softcapping", None)
        assert shape.final_softcap == getattr(theirs, "final_logit_softcapping", None)
        assert shape.layer_windows == _their_windows(given["model_type"], model)
        ropes = theirs.rope_parameters
        main = ropes.get("full_attention", ropes)
        assert (shape.rope.theta, shape.rope.scaling.kind) == (main["rope_theta"], main["rope_type"])
        if "sliding_attention" in ropes:
            assert shape.local_rope == Rope(ropes["sliding_attention"]["rope_theta"])
        if hasattr(attention, "q_proj"):
            projections = attention.q_proj.bias is not None, attention.o_proj.bias is not None
            assert (shape.qkv_bias, shape.out_bias) == projections
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "up_proj"):
            assert shape.mlp_bias == (layer.mlp.up_proj.bias is not None)


def _their_windows(family: str, model: Any) -> tuple[int | None, ...]:
    layers = model.model.layers
    if family in ("qwen2", "qwen3"):
        return tuple(layer.self_attn.sliding_window for layer in layers)
    window = None if family == "llama" else getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(layers)
    return tuple(window if kind == "sliding_attention" or family == "mistral" else None for kind in kinds)
