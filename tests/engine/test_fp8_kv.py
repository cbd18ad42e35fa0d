"""A KV cache in FP8: the scales of the weights change no result, and the rounding changes logits little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.scheduling.batch import ScheduledSeq
from pdserve.core.kv_layout import FP8
from tests.engine.harness import BLOCK, GREEDY, logits_of, make_runner
from tests.engine.test_model_vs_transformers import BASE, BIASES, GEMMA2, PHI3, QWEN2, QWEN3
from tests.random_models import save_random

TOKENS = [(7 * i) % BASE["vocab_size"] for i in range(45)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BIASES,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "phi3": PHI3 | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "olmo2": {"model_type": "olmo2"},
}


def logits(folder: Path, kv_dtype: str | None, dtype: str = "float32") -> torch.Tensor:
    """Logits ``[len(TOKENS), vocabulary]`` of a prompt and decodes."""
    runner = make_runner(folder, dtype=dtype, kv_dtype=kv_dtype)
    parts = [range(40), *(range(i, i + 1) for i in range(40, len(TOKENS)))]
    steps = [
        [ScheduledSeq("", [TOKENS[i] for i in part], part.start, list(range(-(-len(TOKENS) // BLOCK))), True, GREEDY)]
        for part in parts
    ]
    return logits_of(runner, steps)[""].float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_change_no_bit(family: str, dtype: str, tmp_path: Path) -> None:
    save_random(tmp_path, BASE | FAMILIES[family], seed=11)
    assert torch.equal(logits(tmp_path, dtype, dtype), logits(tmp_path, None, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_cache_in_fp8(family: str, tmp_path: Path) -> None:
    save_random(tmp_path, BASE | FAMILIES[family], seed=11)
    exact = logits(tmp_path, None)
    apart = float((logits(tmp_path, FP8) - exact).norm() / exact.norm())
    assert 0.0 < apart < 0.2


@pytest.mark.parametrize("factor", [2.0**-12, 2.0**12])
def test_keys_and_values_of_any_size(factor: float, tmp_path: Path) -> None:
    """FP8 alone would round them to 0, or to its largest number."""
    save_random(tmp_path, BASE, seed=11)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensor.mul_(factor)
        if "q_proj" in name or "o_proj" in name:
            tensor.div_(factor)
    save_file(tensors, file, {"format": "pt"})
    exact = logits(tmp_path, None)
    assert (logits(tmp_path, FP8) - exact).norm() < 0.2 * exact.norm()
