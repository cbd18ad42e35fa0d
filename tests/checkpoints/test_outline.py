"""Sizes of models that are not served, against transformers' parameters and numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoints.families import FAMILIES
from checkpoints.outline import is_served, outline_from_hf, outlined_shape
from checkpoints.source import resolve_model
from pdserve.core.errors import ModelError

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
MLA = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16}
ROUTED = {"n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
NEXT = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_experts": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "head_dim": 16,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], int, int]] = {  # the numbers of a token's cache, and of a request's state
    "GPT2LMHeadModel": (
        {"model_type": "gpt2", "vocab_size": 131, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4},
        3 * 2 * 64,
        0,
    ),
    "DeepseekV3ForCausalLM": (
        PLAIN | MLA | ROUTED | {"model_type": "deepseek_v3", "num_attention_heads": 4, "n_group": 2, "topk_group": 1,
                                "num_key_value_heads": 4, "first_k_dense_replace": 1},
        4 * (24 + 8),
        0,
    ),
    "DeepseekV2ForCausalLM": (
        PLAIN | MLA | ROUTED | {"model_type": "deepseek_v2", "num_attention_heads": 4, "q_lora_rank": None,
                                "num_key_value_heads": 4, "first_k_dense_replace": 2},
        4 * (24 + 8),
        0,
    ),
    "JambaForCausalLM": (
        PLAIN | HEADS | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 3,
                         "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True},
        2 * 2 * 16,
        3 * 128 * (3 + 6),
    ),
    "Qwen3NextForCausalLM": (
        PLAIN | HEADS | NEXT | {"model_type": "qwen3_next", "mlp_only_layers": [2]},
        2 * 2 * 16,
        3 * ((2 * 16 + 48) * 3 + 4 * 8 * 12),
    ),
    "MambaForCausalLM": (
        {"model_type": "mamba", "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 5,
         "conv_kernel": 4, "use_bias": True},
        0,
        2 * 128 * (3 + 5),
    ),
    "Mamba2ForCausalLM": (
        {"model_type": "mamba2", "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 5,
         "conv_kernel": 4, "num_heads": 8, "head_dim": 16, "n_groups": 2},
        0,
        2 * ((128 + 20) * 3 + 8 * 16 * 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", CASES)
def test_sizes_are_those_of_transformers(architecture: str) -> None:
    config, kv_numbers, state_numbers = CASES[architecture]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    outline = outline_from_hf({"architectures": [architecture], "dtype": "bfloat16", **config}, "m")
    assert outline.exact
    assert outline.num_parameters == sum(p.numel() for p in model.parameters())
    assert (outline.kv_numbers, outline.state_numbers) == (kv_numbers, state_numbers)
    assert outline.kv_bytes_per_token("bfloat16") == 2 * kv_numbers
    assert outline.request_bytes("float32", 10) == 4 * (10 * kv_numbers + state_numbers)
    assert not is_served({"architectures": [architecture]})


def test_published_caches() -> None:
    """DeepSeek-V3 caches 70 KB a token in bfloat16, Jamba 1.5 Mini has attention in 4 of 32 layers."""
    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168,
                "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
                "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3}  # fmt: skip
    outline = outline_from_hf(deepseek, "m")
    assert outline.kv_bytes_per_token("bfloat16") == 70_272
    assert outline.num_parameters == pytest.approx(671e9, rel=1e-3)
    assert outline.attention == "MLA: a latent of 512 and a rope key of 64 per layer"
    jamba = {"architectures": ["JambaForCausalLM"], "vocab_size": 65_536, "hidden_size": 4096,
             "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
    outline = outline_from_hf(jamba, "m")
    assert (outline.kv_layers, outline.kv_bytes_per_token("bfloat16")) == (4, 16_384)
    assert outline.num_parameters == pytest.approx(51.6e9, rel=1e-2)


def test_other_decoders_are_estimated() -> None:
    config = PLAIN | HEADS | {"architectures": ["NewForCausalLM"]}
    outline = outline_from_hf(config, "m")
    assert (outline.attention, outline.exact, outline.kv_numbers) == ("GQA", False, 4 * 2 * 2 * 16)
    linear = config | {"layer_types": ["linear_attention", "full_attention"] * 2}
    assert outline_from_hf(linear, "m").kv_numbers == 2 * 2 * 2 * 16
    inside = {"architectures": ["SeeingForConditionalGeneration"], "text_config": config, "vision_config": {}}
    assert outline_from_hf(inside, "m").kv_numbers == outline.kv_numbers


@pytest.mark.parametrize("architecture", [name for name, (_, numbers, _) in CASES.items() if numbers])
def test_the_shape_of_a_model_that_another_engine_serves_has_its_cache_and_its_vocabulary(architecture: str) -> None:
    values, kv_numbers, _ = CASES[architecture]
    config = {"architectures": [architecture], "dtype": "bfloat16", "max_position_embeddings": 32, "eos_token_id": 7}
    shape = outlined_shape({**config, **values}, "m")
    assert shape.kv_bytes_per_token("bfloat16") == 2 * kv_numbers
    assert (shape.vocab_size, shape.max_position_embeddings, shape.eos_token_ids) == (131, 32, (7,))
    assert shape.dtype == "bfloat16"


def test_other_engines_serve_what_pdserve_refuses(tmp_path: Path) -> None:
    """An architecture that it does not know, and one that it knows with weights that it does not."""
    config = {**PLAIN, **HEADS, "max_position_embeddings": 64, "eos_token_id": [7, 8]}
    awq = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "model.safetensors").touch()
    for more in ({"architectures": ["NewForCausalLM"]}, awq):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        with pytest.raises(ModelError, match="not supported"):
            resolve_model(str(tmp_path))
        shape = resolve_model(str(tmp_path), served=False).shape
        assert shape.kv_bytes_per_token("float32") == 4 * 4 * 2 * 2 * 16
        assert (shape.vocab_size, shape.max_position_embeddings, shape.eos_token_ids) == (131, 64, (7, 8))
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, **HEADS, "architectures": ["NewForCausalLM"]}))
    with pytest.raises(ModelError, match="cannot tell the context or the cache of a NewForCausalLM"):
        resolve_model(str(tmp_path), served=False)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ModelError, match=r"^m: 'hidden_size' must be a positive whole number, got None"):
        outline_from_hf({"architectures": ["NewForCausalLM"]}, "m")
    with pytest.raises(ModelError, match=r"^m: 'num_attention_heads' must be"):
        outline_from_hf({"architectures": ["DeepseekV3ForCausalLM"], **PLAIN}, "m")


def test_what_is_served() -> None:
    assert all(is_served({"architectures": [name]}) for name in FAMILIES)
    assert not is_served({})
