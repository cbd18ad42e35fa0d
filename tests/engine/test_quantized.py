"""Checkpoints in 8 bits: their weights are the dequantized ones.

Each test writes a folder as the format's own tools do, and a second one with the same weights dequantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.source import resolve_model
from engine.model.layers import FP8_MAX, FP8Linear
from engine.model.loader import check_weights, load_weights
from engine.model.weights import QuantizedTensor, named_tensors
from pdserve.core.errors import ModelError
from tests.random_models import save_random

QUANTIZED_BASE = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "phi3": {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}
CPU = torch.device("cpu")
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def _compressed(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "float" else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
        "ignore": ["lm_head", "re:.*block_sparse_moe[.]gate$"],
    }


FORMATS: dict[str, tuple[dict[str, Any], torch.dtype, tuple[int | None, int | None], str]] = {
    "compressed_fp8_tensor": (_compressed("float", "tensor"), FP8, (None, None), "weight_scale"),
    "compressed_fp8_channel": (_compressed("float", "channel"), FP8, (1, None), "weight_scale"),
    "compressed_fp8_block": (_compressed("float", "block", block_structure=[40, 24]), FP8, (40, 24), "weight_scale"),
    "compressed_int8_channel": (_compressed("int", "channel"), INT8, (1, None), "weight_scale"),
    "compressed_int8_group": (_compressed("int", "group", group_size=16), INT8, (1, 16), "weight_scale"),
    "fp8_block": (
        {"quant_method": "fp8", "weight_block_size": [32, 48], "modules_to_not_convert": ["lm_head"]},
        FP8, (32, 48), "weight_scale_inv",
    ),
    "fp8_tensor": ({"quant_method": "fp8", "weight_block_size": None}, FP8, (None, None), "weight_scale_inv"),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, FP8, (1, None), "weight_scale"),
    "bitsandbytes_int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, INT8, (1, None), "SCB"),
}  # fmt: skip


def _quantize(
    weight: torch.Tensor, dtype: torch.dtype, block: tuple[int | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales with one entry per block, and what the two mean, block by block."""
    rows, columns = weight.shape
    height, width = block[0] or rows, block[1] or columns
    values = torch.empty(rows, columns, dtype=dtype)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale = weight[place].abs().max() / (127 if dtype is INT8 else 448)
            scaled = weight[place] / scale
            values[place] = (scaled.round() if dtype is INT8 else scaled).to(dtype)
            scales[i, j] = scale
            meant[place] = values[place].float() * scale
    return values, scales, meant


def write_quantized(tmp_path: Path, family: str, format_name: str) -> tuple[Path, Path]:
    """The quantized folder, and the dequantized one."""
    config, dtype, block, suffix = FORMATS[format_name]
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    save_random(plain, QUANTIZED_BASE | FAMILIES[family], seed=7)
    tensors, meant = load_file(plain / "model.safetensors"), {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        inside = "_proj" in name or ".experts." in name
        meant[name] = tensor
        result[name] = tensor
        if inside:
            values, scales, meant[name] = _quantize(tensor, dtype, block)
            result[name] = values
            if suffix == "SCB":
                scales = scales[:, 0] * 127
            elif scales.numel() == 1:
                scales = scales.reshape(1)
            result[name.removesuffix("weight") + suffix] = scales
            result[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(result, stored / "model.safetensors", {"format": "pt"})
    plain_config = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(plain_config | {"quantization_config": config}))
    return stored, plain


FP8_ROWS = {"compressed_fp8_tensor", "compressed_fp8_channel", "fp8_tensor", "fbgemm_fp8"}
CASES = [("llama", name) for name in FORMATS] + [("phi3", "compressed_fp8_channel"), ("phi3", "fp8_block")]
CASES += [("mixtral", "compressed_int8_channel"), ("mixtral", "fp8_block"), ("mixtral", "fp8_tensor")]


@pytest.mark.parametrize(("family", "format_name"), CASES)
def test_weights_are_the_dequantized_ones(family: str, format_name: str, tmp_path: Path) -> None:
    """Those that stay FP8, too, whose products quantize the rows of their input in the same way."""
    stored, plain = write_quantized(tmp_path, family, format_name)
    source = resolve_model(str(stored))
    check_weights(source)
    meant = named_tensors(load_weights(resolve_model(str(plain)), torch.float32, CPU))
    loaded = named_tensors(load_weights(source, torch.float32, CPU))
    kept = named_tensors(load_weights(source, torch.float32, CPU, keep_fp8=True))
    assert meant.keys() == loaded.keys() == kept.keys()
    quantized = 0
    for name, tensor in kept.items():
        matrix = loaded[name]
        assert isinstance(matrix, torch.Tensor)
        torch.testing.assert_close(matrix, meant[name])
        if isinstance(tensor, QuantizedTensor):
            quantized += 1
            assert tensor.values.element_size() == 1
            assert torch.equal(tensor.dequantized(torch.float32), matrix)
            x, residual = torch.randn(3, matrix.shape[1]), torch.randn(3, matrix.shape[0])
            x[1] = 0.0
            product = FP8Linear(tensor, torch.ones(matrix.shape[0]))
            values, scales = product.quantized(x)
            rounded = values.float() * scales
            assert values.float().abs().amax(1).tolist() == [FP8_MAX, 0.0, FP8_MAX]
            torch.testing.assert_close(rounded, x, rtol=2**-4, atol=x.abs().max().item() / 2**17)
            expected = rounded @ matrix.T + 1.0
            torch.testing.assert_close(product(x), expected)
            torch.testing.assert_close(product.plus(x, residual.clone()), residual + expected)
        else:
            assert torch.equal(tensor, matrix)
    matrices = sum("_proj" in name or ".experts." in name for name in kept)
    assert quantized == (matrices if format_name in FP8_ROWS else 0)


def test_faults_are_named(tmp_path: Path) -> None:
    stored, _ = write_quantized(tmp_path, "llama", "compressed_fp8_channel")
    tensors = load_file(stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    scale = "model.layers.1.self_attn.o_proj.weight_scale"

    def check(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            load_weights(resolve_model(str(stored)), torch.float32, CPU)

    save_file({k: v for k, v in tensors.items() if k != scale}, stored / "model.safetensors")
    check(r"'model\.layers\.1\.self_attn\.o_proj\.weight_scale' is in none")
    save_file(tensors | {scale: torch.ones(7, 1)}, stored / "model.safetensors")
    check(r"o_proj\.weight_scale' is \[7, 1\], but config\.json requires \[64, 1\]")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, stored / "model.safetensors")
    check(r"down_proj\.weight' is float32, but config\.json requires float8_e4m3fn")
    save_file(tensors, stored / "model.safetensors")
    config["quantization_config"]["ignore"] += ["model.layers.0.self_attn.q_proj"]
    (stored / "config.json").write_text(json.dumps(config))
    check("covers only some of self_attn.q_proj, self_attn.k_proj, self_attn.v_proj in layer 0; they are one product")


def test_dummies_of_a_quantized_config(tmp_path: Path) -> None:
    stored, _ = write_quantized(tmp_path, "mixtral", "compressed_fp8_channel")
    source = resolve_model(f"dummy:{stored / 'config.json'}")
    kept = named_tensors(load_weights(source, torch.float32, CPU, keep_fp8=True))
    matrix = kept["model.layers.1.self_attn.o_proj.weight"]
    assert isinstance(matrix, QuantizedTensor)
    assert matrix.dequantized(torch.float32).std().item() == pytest.approx(0.02, rel=0.2)
