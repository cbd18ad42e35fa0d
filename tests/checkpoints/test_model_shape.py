"""Shapes as arithmetic, against counts that are known."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints.hf_config import shape_from_hf
from checkpoints.shape import RopeScaling
from pdserve.core.errors import ModelError

LLAMA_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
LLAMA_3_8B = LLAMA_135M | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "eos_token_id": [128001, 128009],
}  # fmt: skip
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_135M, 134_515_008),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_2_7B, 6_738_415_616),
    ],
    ids=["135m", "Llama-3-8B", "Llama-2-7B"],
)
def test_known_parameter_counts(config: dict[str, Any], parameters: int) -> None:
    shape = shape_from_hf(config, "m")
    assert shape.num_parameters == parameters
    assert shape.weight_bytes("bfloat16") == 2 * parameters
    assert shape.weight_bytes("float32") == 4 * parameters


def test_kv_bytes_per_token() -> None:
    assert shape_from_hf(LLAMA_3_8B, "m").kv_bytes_per_token("bfloat16") == 128 * 1024
    assert shape_from_hf(LLAMA_3_8B, "m").kv_bytes_per_token("bfloat16", num_kv_heads=32) == 512 * 1024
    assert shape_from_hf(LLAMA_2_7B, "m").kv_bytes_per_token("float16") == 512 * 1024
    assert shape_from_hf(LLAMA_135M, "m").kv_bytes_per_token("float32") == 46_080


@pytest.mark.parametrize(("kv_heads", "name"), [(32, "MHA"), (8, "GQA"), (1, "MQA"), (None, "MHA")])
def test_attention_is_named(kv_heads: int | None, name: str) -> None:
    assert shape_from_hf(LLAMA_3_8B | {"num_key_value_heads": kv_heads}, "m").attention == name


def test_ends_and_dtypes_are_those_of_the_file() -> None:
    """`tests.engine.test_shapes_vs_transformers` has the other fields, and their defaults."""
    small, large, plain = (shape_from_hf(config, "m") for config in (LLAMA_135M, LLAMA_3_8B, LLAMA_2_7B))
    assert (small.dtype, plain.dtype) == ("bfloat16", "float32")
    assert [shape.eos_token_ids for shape in (small, large, plain)] == [(0,), (128001, 128009), ()]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_dtype_by_its_old_and_new_name(key: str, value: str) -> None:
    config = {k: v for k, v in LLAMA_135M.items() if k != "torch_dtype"} | {key: value}
    assert shape_from_hf(config, "m").dtype == "float16"


LLAMA_3_1_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rope_scaling_in_all_its_spellings() -> None:
    def scaling(**extra: Any) -> RopeScaling:
        return shape_from_hf(LLAMA_3_8B | extra, "m").rope_scaling

    llama3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert scaling(rope_scaling={"rope_type": "llama3", **LLAMA_3_1_ROPE}) == llama3
    assert scaling(rope_scaling={"type": "linear", "factor": 2}) == RopeScaling("linear", 2.0)
    assert scaling(rope_scaling=None) == scaling(rope_scaling={"rope_type": "default"}) == RopeScaling()
    new = shape_from_hf(
        LLAMA_2_7B | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA_3_1_ROPE}}, "m"
    )
    assert (new.rope_scaling, new.rope_theta) == (llama3, 5e5)


# --- what is wrong ---------------------------------------------------------------------------------------------------

NEEDED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]


@pytest.mark.parametrize("value", [None, 0, "8", True])
@pytest.mark.parametrize("key", NEEDED)
def test_a_number_that_is_missing_or_wrong_is_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_hf(LLAMA_3_8B | {key: value}, "folder/config.json")
    assert str(caught.value) == f"folder/config.json: '{key}' must be a positive whole number, got {value!r}"


@pytest.mark.parametrize("value", [-8, 8.5])
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_an_optional_number_that_is_wrong_is_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"^m: '{key}' must be a positive whole number, got "):
        shape_from_hf(LLAMA_3_8B | {key: value}, "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": []}, r"architecture '\?' is not supported"),
        ({"architectures": None}, "is not supported; supported: "),
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
        ({"num_key_value_heads": 5}, "32 attention heads do not divide by 5 KV heads"),
        ({"hidden_size": 4097}, "'hidden_size' 4097 is no multiple of 32 heads and there is no 'head_dim'"),
        ({"torch_dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' of linear rope scaling must be a positive number, got None"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "'factor' of linear rope scaling .* got 'x'"),
        *(
            (
                {"rope_scaling": {"rope_type": "llama3", **{k: v for k, v in LLAMA_3_1_ROPE.items() if k != key}}},
                f"'{key}' of llama3 rope scaling must be a positive number, got None",
            )
            for key in LLAMA_3_1_ROPE
        ),
    ],
)
def test_what_cannot_be_served_says_why_and_where(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"^folder/config.json: .*{words}"):
        shape_from_hf(LLAMA_3_8B | change, "folder/config.json")
