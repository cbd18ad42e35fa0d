"""What each family's ``config.json`` means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints.hf_config import shape_from_hf
from pdserve.core.errors import ModelError

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}
LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE = (
    BASE | {"architectures": [f"{name}ForCausalLM"]}
    for name in ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Mixtral", "Qwen3Moe"]
)


ON = {"use_sliding_window": True, "sliding_window": 7}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 7, "layer_types": [SLIDING] * 4}, (7, 7, 7, 7)),
        (QWEN2 | ON | {"max_window_layers": 0}, (7, 7, 7, 7)),
        (QWEN2 | ON | {"max_window_layers": 3}, (None, None, None, 7)),
        (QWEN3 | ON | {"max_window_layers": 3, "layer_types": [SLIDING, FULL, SLIDING, FULL]}, (7, None, 7, None)),
        (QWEN3 | {"layer_types": [FULL] * 4}, ()),
        (LLAMA | {"sliding_window": 7}, ()),  # transformers does not read it either
    ],
)
def test_windows_by_layer(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    shape = shape_from_hf(config, "m")
    assert shape.windows == windows
    assert shape.layer_windows == (windows or (None,) * 4)


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MISTRAL | {"sliding_window": 0}, "'sliding_window' must be a positive whole number, got 0"),
        (MISTRAL | {"sliding_window": "4k"}, "'sliding_window' must be a positive whole number, got '4k'"),
        (MISTRAL | {"layer_types": [SLIDING, FULL] * 2}, "'layer_types' mixes windows"),
        (LLAMA | {"layer_types": [SLIDING] * 4}, "'layer_types' mixes windows"),
        (QWEN2 | ON | {"max_window_layers": -1}, "'max_window_layers' must be a whole number of 0 or more, got -1"),
        (QWEN2 | {"use_sliding_window": "yes"}, "'use_sliding_window' must be true or false, got 'yes'"),
        (QWEN2 | ON | {"layer_types": [FULL] * 3}, "'layer_types' must be a list of 4, one for each layer"),
        (QWEN2 | ON | {"layer_types": ["linear_attention"] * 4}, "'layer_types' names 'linear_attention'"),
        (QWEN2 | {"layer_types": [SLIDING] * 4}, "'layer_types' names sliding_attention, but there is no window"),
        (QWEN2 | {"use_mrope": True}, "'use_mrope' is set"),
        (LLAMA | {"attention_bias": 1}, "'attention_bias' must be true or false, got 1"),
        *(
            (
                LLAMA | {"quantization_config": config},
                f"'quantization_config': checkpoints of {config['quant_method']!r} are not supported; use the model's ",
            )
            for config in (
                {"quant_method": "gptq", "bits": 4},
                {"quant_method": "awq", "bits": 4},
                {"quant_method": "bitsandbytes", "load_in_4bit": True},
            )
        ),
        *(
            (
                LLAMA | {"quantization_config": PACKED | change},
                f"'quantization_config': {words}",
            )
            for change, words in (
                ({}, "format 'pack-quantized' of 4 bits is not supported; use the model's"),
                ({"config_groups": {}}, "'config_groups' must be an object with one group"),
                (
                    {"format": "float-quantized", "config_groups": {"0": {"targets": ["Linear"]}}},
                    "the group must have ",
                ),
            )
        ),
        (LLAMA | {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' 0.5 is not supported"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor' 0.5 is not supported"),
        (LLAMA | {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "'rope_parameters' has settings of its own for "),
        (LLAMA | {"rope_scaling": "linear"}, "'rope_scaling' must be an object, got 'linear'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'rope_type': rope scaling 'dynamic'"),
        (LLAMA | {"rope_theta": "big"}, "'rope_theta' must be a positive number, got 'big'"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "'rms_norm_eps' must be a positive number, got '1e-5'"),
        (GEMMA2 | {"hidden_activation": "silu"}, "'hidden_activation' must be 'gelu_pytorch_tanh', got 'silu'"),
        (GEMMA2 | {"attn_logit_softcapping": -1}, "'attn_logit_softcapping' must be a positive number, got -1"),
        (GEMMA2 | {"sliding_window": None}, "'layer_types' names sliding_attention, but there is no window; set '"),
        (GEMMA3 | {"attn_logit_softcapping": 5.0}, "'attn_logit_softcapping' is set, which this architecture ignores"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is set"),
        (GEMMA3 | {"query_pre_attn_scalar": "x"}, "'query_pre_attn_scalar' must be a positive number, got 'x'"),
        (PHI3 | {"head_dim": 8, "partial_rotary_factor": 0.4}, "'partial_rotary_factor' 0.4 makes rope turn 3 of 8"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": []}}, "'long_factor' of longrope rope scaling must be a "),
        (PHI3 | {"head_dim": 8, "rope_scaling": LONGROPE}, "'short_factor' of longrope rope scaling must have 4 "),
        (LLAMA | {"rope_scaling": LONGROPE}, "'rope_type': rope scaling 'longrope' is not supported"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "'factor' of yarn rope scaling must be a positive number"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 exceeds 'num_local_experts' 8"),
        (QWEN3_MOE | {"mlp_only_layers": "1"}, "'mlp_only_layers' must be a list of layer numbers, got '1'"),
        (QWEN3_MOE | {"moe_intermediate_size": 0}, "'moe_intermediate_size' must be a positive whole number, got 0"),
        (LLAMA | {"head_dim": 3}, "'head_dim' must be even, as rope turns pairs, got 3"),
    ],
)
def test_what_is_refused_says_where_and_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_hf(config, "folder/config.json")
    assert str(caught.value).startswith(f"folder/config.json: {words}")


def test_a_whole_rope_factor_is_no_partial_one() -> None:
    assert shape_from_hf(LLAMA | {"partial_rotary_factor": 1.0}, "m").rope_theta == 10_000.0


def test_longrope_is_chosen_by_the_service_s_context() -> None:
    config = PHI3 | {"max_position_embeddings": 8192, "original_max_position_embeddings": 4096}
    shape = shape_from_hf(config | {"rope_scaling": LONGROPE}, "m")
    assert shape.rope_scaling.attention_factor == pytest.approx((1 + 1 / 12) ** 0.5)
    assert not shape.uses_long_rope(4096)
    assert shape.uses_long_rope(4097)
    assert not shape_from_hf(config, "m").uses_long_rope(8192)  # no longrope at all
    old = shape_from_hf(config | {"rope_scaling": {**LONGROPE, "rope_type": "su"}}, "m")
    assert old.rope_scaling == shape.rope_scaling


def test_yarn_stretches_the_context() -> None:
    """Qwen's files name the original context beside yarn, others the stretched one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for longest in (512, 2048):
        shape = shape_from_hf(QWEN2 | {"max_position_embeddings": longest, "rope_scaling": yarn}, "m")
        assert shape.max_position_embeddings == 2048
