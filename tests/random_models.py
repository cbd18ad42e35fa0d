"""Small random Llama models as Hugging Face folders, and transformers as the oracle for their greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mqa": {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3_rope": {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
}


def save_random_model(folder: Path, shape: str) -> Path:
    """A float32 model of ``SHAPES[shape]`` under ``folder``; its end-of-sequence id is never sampled by accident."""
    torch.manual_seed(list(SHAPES).index(shape))
    config = LlamaConfig(
        vocab_size=307,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,  # large, so that greedy tokens differ from each other
        **SHAPES[shape],
    )
    target = folder / shape
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(target)
    return target


def greedy_tokens(folder: Path, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """What transformers makes of ``prompt``, greedily, in float32; ``options`` are those of its `generate`."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=num_tokens,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
            **options,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
