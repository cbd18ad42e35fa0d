"""The arithmetic of `model-info`, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoints.shape import Experts, ModelShape, RopeScaling
from checkpoints.source import resolve_model
from ops import model_memory
from pdserve.core.config import PdserveConfig

LLAMA_8B = ModelShape(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(),
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def test_kv_variants_from_widest_to_narrowest() -> None:
    variants = {v["name"]: v["bytes_per_token"] for v in model_memory.kv_variants(LLAMA_8B, "bfloat16")}
    assert list(variants) == ["MHA", "GQA-2", "GQA-4", "GQA-8", "GQA-16", "MQA", "MLA"]
    assert variants["MHA"] == 524_288
    assert variants["GQA-4"] == LLAMA_8B.kv_bytes_per_token("bfloat16")
    assert variants["MQA"] == 16_384
    assert variants["MLA"] == 32 * (512 + 64) * 2
    assert model_memory.mla_dims(LLAMA_8B) == (512, 64)


def test_a_window_caps_the_cache() -> None:
    assert model_memory.window_kv_bytes(LLAMA_8B, "bfloat16", 8192, [4096] * 32) == 4096 * 131_072
    mixed = [4096] * 8 + [None] * 24
    assert model_memory.window_kv_bytes(LLAMA_8B, "bfloat16", 8192, mixed) == (8 * 4096 + 24 * 8192) * 4096
    assert model_memory.window_kv_bytes(LLAMA_8B, "bfloat16", 100, [4096] * 32) == 100 * 131_072


def test_activations_grow_with_the_budget() -> None:
    logits = 128_256 * 4
    one = model_memory.activation_bytes(LLAMA_8B, "bfloat16", 1)
    assert one == (2 * 4096 + 3 * 14_336) * 2 + logits
    assert model_memory.activation_bytes(LLAMA_8B, "bfloat16", 512) - logits == 512 * (one - logits)


def test_what_fits() -> None:
    step = model_memory.activation_bytes(LLAMA_8B, "bfloat16", 512)
    fit, none = (model_memory.fit(LLAMA_8B, "bfloat16", gb * 10**9, 8192, 8192 * 131_072, step) for gb in (24, 10))
    kv_bytes = 24 * 10**9 - LLAMA_8B.weight_bytes("bfloat16") - step
    tokens = kv_bytes // 131_072
    assert list(fit.values()) == [24 * 10**9, kv_bytes, tokens, tokens // 8192, 1]
    assert tokens // 8192 == 7
    assert list(none.values()) == [10 * 10**9, 0, 0, 0, 2]


def test_a_draft_model_shares_the_pool() -> None:
    tiny, other = resolve_model("tiny"), resolve_model("dummy:135m")
    settings = {"engine": {"kv_memory_mb": 4}, "model": {"dtype": "bfloat16"}}
    alone, drafting = (
        model_memory.ServedModel.of(tiny, PdserveConfig.parse(settings), "cpu", draft) for draft in (None, other)
    )
    assert drafting.weight_bytes - alone.weight_bytes == other.shape.weight_bytes("bfloat16")
    assert drafting.pool_bytes == alone.pool_bytes == 4 * 2**20
    token_bytes = [each.shape.kv_bytes_per_token("bfloat16") for each in (tiny, other)]
    assert (alone.pool_tokens(), drafting.pool_tokens()) == (4 * 2**20 // token_bytes[0], 4 * 2**20 // sum(token_bytes))
    counted = PdserveConfig.parse({"engine": {"num_blocks": 8, "block_size": 16}, "model": {"dtype": "bfloat16"}})
    assert model_memory.ServedModel.of(tiny, counted, "cpu", other).pool_bytes == 8 * 16 * sum(token_bytes)


def test_a_token_uses_some_of_the_experts() -> None:
    """Mixtral 8x7B, as published: 46.7 billion parameters, 12.9 billion per token."""
    mixtral = replace(LLAMA_8B, vocab_size=32_000, experts=Experts(8, 2, 14_336))
    assert (mixtral.num_parameters, mixtral.active_parameters) == (46_702_792_704, 12_879_925_248)
    idle = 32 * 6 * 3 * 4096 * 14_336
    assert 32 * (mixtral.layer_matrices - mixtral.active_layer_matrices) == idle
    dense = replace(mixtral, experts=Experts(8, 2, 14_336, dense_layers=tuple(range(1, 32))))
    assert dense.num_parameters == mixtral.num_parameters - 31 * (7 * 3 * 4096 * 14_336 + 8 * 4096)
    assert model_memory.prefill_flops_per_token(mixtral, 1) == pytest.approx(
        2 * (mixtral.active_parameters - 32_000 * 4096 - 65 * 4096) + 4 * 32 * 4096
    )


def test_a_window_saves_attention_but_no_weights() -> None:
    windowed = replace(LLAMA_8B, windows=(4,) * 16 + (None,) * 16, qkv_bias=True, qk_norm=True)
    saved = model_memory.prefill_flops_per_token(LLAMA_8B, 6) - model_memory.prefill_flops_per_token(windowed, 6)
    # Six tokens see 1 + 2 + 3 + 4 + 5 + 6 = 21 tokens, with a window of 4 they see 1 + 2 + 3 + 4 + 4 + 4 = 18.
    assert saved == pytest.approx(4 * 4096 * 16 * (21 - 18) / 6)


def test_flops_and_phi() -> None:
    flops = model_memory.prefill_flops_per_token(LLAMA_8B, 1)
    matrices = LLAMA_8B.num_parameters - 128_256 * 4096 - 4096 - 32 * 2 * 4096
    assert flops == pytest.approx(2 * matrices + 4 * 32 * 4096)
    # A 1 Mibit token over about 14 GFLOP, which is 14 ms at 1 TFLOP/s: 0.075 Gbit/s; less the longer the prompt.
    phi = model_memory.phi_gbps_per_tflops(LLAMA_8B, "bfloat16", 1024)
    assert phi == pytest.approx(8 * 131_072 / model_memory.prefill_flops_per_token(LLAMA_8B, 1024) * 1e3)
    assert model_memory.phi_gbps_per_tflops(LLAMA_8B, "bfloat16", 8192) < phi
    assert 0.07 < phi < 0.08
