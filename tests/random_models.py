"""Small random models of all families as Hugging Face folders, and transformers as the oracle for their greedy
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    "mistral_window": {
        "model_type": "mistral",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "sliding_window": 24,
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
}


def save_random_model(folder: Path, shape: str) -> Path:
    """A float32 model of ``SHAPES[shape]`` under ``folder``; its end-of-sequence id is never sampled by accident."""
    target = folder / shape
    sizes = {
        "vocab_size": 307,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
    }
    save_random(target, {"model_type": "llama"} | sizes | SHAPES[shape], seed=list(SHAPES).index(shape))
    return target


def save_random(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """A float32 model of transformers' ``config`` (``model_type`` and what it takes) in ``folder``. Everything is
    random: transformers starts biases with zeros and norms with ones, which would hide that they are left out."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
            initializer_range=0.2,  # large, so that greedy tokens differ from each other
            **config,
        )
    ).to(torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                tensor.normal_(0.0, 0.5)
    model.save_pretrained(folder)


def greedy_tokens(folder: Path, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    """What transformers makes of ``prompt``, greedily, in float32; ``options`` are those of its `generate`."""
    return greedy_tokens_of_all(folder, {"": prompt}, num_tokens, **options)[""]


def greedy_tokens_of_all(
    folder: Path, prompts: Mapping[str, Sequence[int]], num_tokens: int, **options: Any
) -> dict[str, list[int]]:
    """The same for several prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=num_tokens,
                do_sample=False,
                attention_mask=torch.ones(1, len(prompt)),
                **options,
            )
        tokens[name] = output[0, len(prompt) :].tolist()
    return tokens
