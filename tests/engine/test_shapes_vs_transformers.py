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
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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


def _config(family: str, more: str) -> dict[str, Any]:
    return {"architectures": [FAMILIES[family]], "model_type": family, **PLAIN, **MORE[more]}


@pytest.mark.parametrize(
    ("family", "more"),
    [(f, m) for f in FAMILIES for m in MORE if (f, m) != ("mistral", "null_kv_heads")],  # transformers refuses that
)
def test_a_config_is_read_like_transformers_reads_it(family: str, more: str) -> None:
    given = _config(family, more)
    theirs = AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    # What they write back has all defaults filled in: the sparse file and the full one must mean the same.
    for config in (
        given,
        json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": given["architectures"]},
    ):
        shape = shape_from_hf(config, "m")
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        attention = model.model.layers[0].self_attn
        assert shape.head_dim == attention.head_dim
        assert shape.num_kv_heads == theirs.num_key_value_heads
        assert shape.rms_norm_eps == theirs.rms_norm_eps
        assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
        assert shape.rope_scaling.kind == theirs.rope_parameters["rope_type"]
        assert shape.tie_word_embeddings is theirs.tie_word_embeddings
        assert shape.layer_windows == _their_windows(family, model)
        assert (shape.qkv_bias, shape.out_bias) == tuple(
            p.bias is not None for p in (attention.q_proj, attention.o_proj)
        )
        assert shape.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)


def _their_windows(family: str, model: Any) -> tuple[int | None, ...]:
    layers = model.model.layers
    if family == "llama":
        return (None,) * len(layers)
    if family == "mistral":
        return (model.config.sliding_window,) * len(layers)
    return tuple(layer.self_attn.sliding_window for layer in layers)


SMALL = PLAIN | {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"model_type": "gemma2"},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9},
    "Phi3ForCausalLM": {"model_type": "phi3", "pad_token_id": None, "sliding_window": 7},
    "Olmo2ForCausalLM": {"model_type": "olmo2", "attention_bias": True},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 3},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 24, "decoder_sparse_step": 2,
        "moe_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 11,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", MORE_FAMILIES)
def test_more_families_are_read_like_transformers_reads_them(architecture: str) -> None:
    given = {"architectures": [architecture], **SMALL, **MORE_FAMILIES[architecture]}
    theirs = AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    for config in (given, json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": [architecture]}):
        shape = shape_from_hf(config, "m")
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        attention = model.model.layers[0].self_attn
        assert (shape.head_dim, shape.num_kv_heads) == (attention.head_dim, theirs.num_key_value_heads)
        assert shape.attention_scale == attention.scaling
        assert shape.rms_norm_eps == theirs.rms_norm_eps
        assert shape.tie_word_embeddings is theirs.tie_word_embeddings
        assert shape.attention_softcap == (
            attention.attn_logit_softcapping if architecture == "Gemma2ForCausalLM" else None
        )
        assert shape.final_softcap == getattr(theirs, "final_logit_softcapping", None)
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * shape.num_layers
        window = getattr(theirs, "sliding_window", None)
        expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
        assert shape.layer_windows == expected
        ropes = theirs.rope_parameters
        main = ropes.get("full_attention", ropes)
        assert (shape.rope.theta, shape.rope.scaling.kind) == (main["rope_theta"], main["rope_type"])
        if "sliding_attention" in ropes:
            assert shape.local_rope == Rope(ropes["sliding_attention"]["rope_theta"])
