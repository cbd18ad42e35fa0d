"""The decoder of every family against transformers: token for token in float32, and by logits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engine.model.kv_pool import TORCH_DTYPES
from engine.model.layers import linear
from tests.engine.harness import BLOCK, generate, make_ranks, make_runner, prompt_logits
from tests.random_models import greedy_tokens_of_all, save_random

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MISTRAL, QWEN2, QWEN3 = ({"model_type": name} for name in ("mistral", "qwen2", "qwen3"))
TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
MIXED = {"use_sliding_window": True, "max_window_layers": 1}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral_window_1": MISTRAL | {"sliding_window": 1},
    "mistral_window_in_a_block": MISTRAL | {"sliding_window": BLOCK - 3},
    "mistral_window_across_blocks": MISTRAL | {"sliding_window": BLOCK + 4, "vocab_size": 131, "head_dim": 24},
    "qwen2_mixed_windows": QWEN2 | MIXED | {"sliding_window": BLOCK + 3},
    "qwen3_mixed_windows": QWEN3 | MIXED | {"sliding_window": 2 * BLOCK, "head_dim": 24, "attention_bias": True},
}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA2 = {
    "model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": BLOCK + 3,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": BLOCK + 3,
    "layer_types": [SLIDING, FULL, SLIDING], "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}  # fmt: skip
PHI3 = {"model_type": "phi3"}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 9.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": TIED,
    "own_head_dim": {"head_dim": 24},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "llama_biases": BIASES,
    "qwen2": QWEN2 | {"vocab_size": 131},
    "qwen3": QWEN3 | {"head_dim": 24},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3 | {"sliding_window": BLOCK + 3},
    "phi4_partial_rope": PHI3 | TIED | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    "phi4_longrope_short": PHI3
    | {
        "original_max_position_embeddings": 200,
        "max_position_embeddings": 200,
        "rope_parameters": LONGROPE | {"factor": 4.0},
    },
    "phi4_longrope_long": PHI3
    | {"original_max_position_embeddings": 1, "rope_parameters": LONGROPE | {"attention_factor": 1.2}},
    "olmo2": {"model_type": "olmo2"},
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_mixed": QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "yarn_options": {
        "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    },
    "qwen2_yarn": QWEN2 | {"rope_parameters": YARN | {"attention_factor": 0.9, "truncate": False}},
    **WINDOWED,
}
SAME_CODE = ("tied", "own_head_dim", "qwen2_yarn", "mistral_window_in_a_block", "qwen2_mixed_windows")
"""As others."""
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 45)
TOKENS = 10


def params(names: Iterable[str]) -> list[Any]:
    """Those of a variant; those of `SAME_CODE` run in `make soak`."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in SAME_CODE)) for name in names]


@pytest.fixture(scope="module", params=params(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """A model folder and prompts of several lengths."""
    folder = tmp_path_factory.mktemp(request.param)
    config = BASE | VARIANTS[request.param]
    save_random(folder, config, seed=len(request.param))
    prompts = {str(n): torch.randint(0, config["vocab_size"], (n,)).tolist() for n in LENGTHS}
    return folder, prompts


@pytest.fixture(scope="module")
def expected(case: tuple[Path, dict[str, list[int]]]) -> dict[str, list[int]]:
    """What transformers makes of the prompts, each token computed anew (its cache cannot do a window of 1)."""
    folder, prompts = case
    return greedy_tokens_of_all(folder, prompts, TOKENS, use_cache=False)


def test_one_prompt_at_a_time(case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]]) -> None:
    folder, prompts = case
    runner = make_runner(folder)
    for name, prompt in prompts.items():
        assert generate(runner, {name: prompt}, TOKENS)[name] == expected[name], f"prompt of {name} tokens"
    assert len({token for tokens in expected.values() for token in tokens}) > 5  # else the test would prove little


def test_chunked_prompts_mixed_with_decodes(
    case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]]
) -> None:
    """Chunks that end within blocks, and around the window if there is one."""
    folder, prompts = case
    window = json.loads((folder / "config.json").read_text()).get("sliding_window")
    runner = make_runner(folder)
    for chunk in {5, *(max(1, window + beside) for beside in (-1, 0, 1) if window)}:
        assert generate(runner, prompts, TOKENS, chunk=chunk, stagger=2) == expected, f"chunks of {chunk}"


@pytest.mark.parametrize("ranks", [*(pytest.param(few, marks=pytest.mark.soak) for few in (2, 3)), 4])
def test_tensor_parallel(case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]], ranks: int) -> None:
    """Each rank has some of the heads; of 4 ranks, two have the same KV head."""
    folder, prompts = case
    assert generate(make_ranks(folder, ranks), prompts, TOKENS, chunk=7, stagger=2) == expected


@pytest.mark.parametrize("case", params(WINDOWED), indirect=True)
def test_the_window_makes_a_difference(
    case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Else its tests would pass without it: for a long prompt, and for a short one whose decode leaves the window."""
    folder, prompts = case
    config = json.loads((folder / "config.json").read_text())
    without = config | {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(without))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens = generate(make_runner(tmp_path), prompts, TOKENS)
    assert tokens["45"] != expected["45"]
    if config["sliding_window"] < BLOCK + TOKENS // 2:
        assert tokens[str(BLOCK + 1)] != expected[str(BLOCK + 1)]


def test_logits(case: tuple[Path, dict[str, list[int]]]) -> None:
    """In float32 they are transformers' own. In bfloat16 two correct programs differ, as each rounds elsewhere: over
    these models transformers' bfloat16 is 1.3 to 5.4 % away from its float32 (RMS of the difference over RMS of the
    logits), ours as much, and the two are 1.3 to 5.0 % apart. So: at most 8 % from its bfloat16, and no further from
    its float32 than 1.5 times what its own bfloat16 is; and the same of float16."""
    folder, prompts = case
    prompt = prompts["45"]
    theirs = {dtype: _their_logits(folder, prompt, dtype) for dtype in TORCH_DTYPES.values()}
    exact, rounded = theirs[torch.float32], theirs[torch.bfloat16]
    moe = "num_experts_per_tok" in json.loads((folder / "config.json").read_text())
    for chunk in (1, 19):
        torch.testing.assert_close(prompt_logits(folder, prompt, "float32", chunk), exact, rtol=1e-4, atol=1e-3)
        ours = prompt_logits(folder, prompt, "bfloat16", chunk).float()
        if moe:
            # Rounding makes the two choose other experts for some tokens, whose logits then differ entirely.
            difference, size = (x.square().mean(1).sqrt() for x in (ours - rounded, exact))
            assert (difference / size).quantile(0.25) <= 0.08
            continue
        assert _rms(ours - rounded) <= 0.08 * _rms(exact)
        assert _rms(ours - exact) <= 1.5 * _rms(rounded - exact)
        ours = prompt_logits(folder, prompt, "float16", chunk).float()
        assert _rms(ours - exact) <= 1.5 * _rms(theirs[torch.float16] - exact)


def _their_logits(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_packed_bfloat16_products_are_the_plain_ones(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(131, 64, generator=generator).to(torch.bfloat16)
    x = torch.randn(rows, 64, generator=generator).to(torch.bfloat16)
    bias = 10 * torch.randn(131, generator=generator).to(torch.bfloat16) if biased else None
    other = torch.randn(rows, 131, generator=generator).to(torch.bfloat16)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    product = linear(weight, bias)
    for result, wanted in (
        (product(x), exact),
        (product.silu(x), functional.silu(exact)),
        (product.times(x, other), exact * other.double()),
        (product.plus(x, other.clone()), exact + other.double()),  # where nothing is packed it overwrites its argument
    ):
        # Where nothing is packed, terms of up to 30 are rounded before they are added.
        torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=1e-1)
