"""The decoder against transformers, token for token, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch import SamplerParams
from engine.linear import linear
from tests.engine.harness import BLOCK, generate, make_runner

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large, so that greedy tokens differ from each other
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "odd_vocabulary": {"vocab_size": 131},
    "own_head_dim": {"head_dim": 24},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
}
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 45)
TOKENS = 10


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """A model folder and prompts of several lengths."""
    torch.manual_seed(len(request.param))
    folder = tmp_path_factory.mktemp(request.param)
    config = LlamaConfig(**{**BASE, **VARIANTS[request.param]})
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    prompts = {str(n): torch.randint(0, config.vocab_size, (n,)).tolist() for n in LENGTHS}
    return folder, prompts


@pytest.fixture(scope="module")
def expected(case: tuple[Path, dict[str, list[int]]]) -> dict[str, list[int]]:
    """What transformers makes of the prompts."""
    folder, prompts = case
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=TOKENS,
                do_sample=False,
            )
        tokens[name] = output[0, len(prompt) :].tolist()
    return tokens


def test_one_prompt_at_a_time(case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]]) -> None:
    folder, prompts = case
    runner = make_runner(folder)
    for name, prompt in prompts.items():
        assert generate(runner, {name: prompt}, TOKENS)[name] == expected[name], f"prompt of {name} tokens"
    assert len({token for tokens in expected.values() for token in tokens}) > 5  # else the test would prove little


@pytest.mark.parametrize("chunk", [1, 5, BLOCK, 2 * BLOCK + 3])
def test_chunked_prompts_mixed_with_decodes(
    case: tuple[Path, dict[str, list[int]]], expected: dict[str, list[int]], chunk: int
) -> None:
    folder, prompts = case
    assert generate(make_runner(folder), prompts, TOKENS, chunk=chunk, stagger=2) == expected


def test_sampled_tokens_do_not_depend_on_the_batch(case: tuple[Path, dict[str, list[int]]]) -> None:
    folder, prompts = case
    params = {name: SamplerParams(0.9, 20, 0.95, seed=int(name)) for name in prompts}
    runner = make_runner(folder)
    together = generate(runner, prompts, TOKENS, chunk=7, params=params, stagger=1)
    for name, prompt in prompts.items():
        assert generate(runner, {name: prompt}, TOKENS, params=params)[name] == together[name]


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_bfloat16_products_are_the_plain_ones(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(131, 64, generator=generator).to(torch.bfloat16)
    x = torch.randn(rows, 64, generator=generator).to(torch.bfloat16)
    exact = functional.linear(x.double(), weight.double())
    torch.testing.assert_close(linear(weight)(x).double(), exact, rtol=2e-2, atol=2e-2)
