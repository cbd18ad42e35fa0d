"""Weights that are read in pieces by several threads are those that a single copy of each whole tensor gives, on CPUs
and, over a stand-in for CUDA, on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import engine.model.loader
import engine.model.reading
from checkpoints.source import ModelSource, resolve_model
from engine.model.loader import load_weights
from engine.model.reading import MAX_THREADS, read_pieces
from engine.model.weights import ModelWeights, QuantizedTensor, named_tensors
from pdserve.core.errors import ModelError
from tests.engine.test_model_vs_transformers import BASE, VARIANTS
from tests.engine.test_quantized import CASES, write_quantized
from tests.random_models import save_random
from tests.strict_cuda import StrictCuda, StrictGpus

CPU = torch.device("cpu")
PIECE_BYTES = 1000
FAMILY_OF = {
    str(BASE["model_type"]): "gqa",
    **{str(v["model_type"]): k for k, v in VARIANTS.items() if "model_type" in v},
}
NAMES = sorted({*FAMILY_OF.values(), "tied", "llama_biases", "phi4_partial_rope"})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model.reading, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture(params=["cpu", "gpu"])
def cuda(request: pytest.FixtureRequest) -> Iterator[StrictCuda | None]:
    """How the device is reached."""
    if request.param == "cpu":
        yield None
        return
    gpus = StrictGpus()
    process = gpus.process()
    process.init(0)
    yield process
    gpus.check()


def copied(source: ModelSource, dtype: torch.dtype, keep_fp8: bool = False) -> ModelWeights:
    """The weights by one copy of each tensor."""
    assert source.folder is not None
    stored = load_file(source.folder / "model.safetensors")
    weights = ModelWeights(source.shape, dtype, CPU, keep_fp8)
    for name, target in named_tensors(weights).items():
        whole = _whole(stored, name, source)
        if isinstance(target, QuantizedTensor):
            assert isinstance(whole, QuantizedTensor)
            target.values.copy_(whole.values)
            target.scales.copy_(whole.scales)
        else:
            target.copy_(whole.dequantized(torch.float32) if isinstance(whole, QuantizedTensor) else whole)
    weights.arrange()
    return weights


def _whole(stored: Mapping[str, torch.Tensor], name: str, source: ModelSource) -> torch.Tensor | QuantizedTensor:
    quantization, tensor = source.shape.quantization, stored[name]
    if quantization is None or quantization.scale_name(name) not in stored:
        return tensor
    rows, columns = tensor.shape
    scales = stored[quantization.scale_name(name)].float() / quantization.divisor
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(scales.shape[0], -1)
    scales = scales.repeat_interleave(quantization.block[0] or rows, dim=0)[:rows]
    return QuantizedTensor(tensor, scales.expand(rows, quantization.column_groups(columns)), quantization.block[1])


def assert_same(weights: ModelWeights, expected: ModelWeights) -> None:
    """AssertionError unless all bits are the same."""
    first, second = named_tensors(weights), named_tensors(expected)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        if isinstance(tensor, QuantizedTensor):
            assert isinstance(other, QuantizedTensor)
            assert torch.equal(tensor.values.view(torch.uint8), other.values.view(torch.uint8)), name
            assert torch.equal(tensor.scales, other.scales), name
        else:
            assert isinstance(other, torch.Tensor)
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    assert (weights.head is weights.embedding) == (expected.head is expected.embedding)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_every_family(name: str, cuda: StrictCuda | None, tmp_path: Path) -> None:
    save_random(tmp_path, BASE | VARIANTS[name], seed=3)
    source = resolve_model(str(tmp_path))
    for dtype in DTYPES:
        assert_same(load_weights(source, dtype, CPU, cuda=cuda), copied(source, dtype))


@pytest.mark.parametrize(("family", "format_name"), CASES)
def test_every_parameter_in_8_bits(family: str, format_name: str, cuda: StrictCuda | None, tmp_path: Path) -> None:
    source = resolve_model(str(write_quantized(tmp_path, family, format_name)[0]))
    for keep_fp8 in (False, True):
        loaded = load_weights(source, torch.bfloat16, CPU, keep_fp8, cuda)
        assert_same(loaded, copied(source, torch.bfloat16, keep_fp8))


def test_a_gpu_gets_all_weights_from_few_pinned_buffers(tmp_path: Path) -> None:
    save_random(tmp_path, BASE, seed=3)
    cuda = StrictGpus().process()
    cuda.init(0)
    load_weights(resolve_model(str(tmp_path)), torch.bfloat16, CPU, cuda=cuda)
    assert 2 <= len(cuda.pinned_storages) <= MAX_THREADS + 1
    assert all(storage.nbytes() <= PIECE_BYTES for storage in cuda.pinned_storages)
    copies = cuda.calls.count("memory of the host is copied to the GPU")
    assert copies > 10 * len(cuda.pinned_storages)
    assert copies == cuda.calls.count("a copy is waited for")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_is_cut_off_while_it_is_read_is_named(
    dtype: torch.dtype, cuda: StrictCuda | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes from a thread. No thread waits for a buffer forever, and PyTorch computes with as many threads as
    before."""
    save_random(tmp_path, BASE, seed=3)
    file = tmp_path / "model.safetensors"

    def cut(*arguments: Any) -> None:
        os.truncate(file, file.stat().st_size // 2)
        read_pieces(*arguments)

    monkeypatch.setattr(engine.model.loader, "read_pieces", cut)
    threads = torch.get_num_threads()
    with pytest.raises(ModelError, match=r"model\.safetensors: corrupt or truncated: it ends at byte \d+"):
        load_weights(resolve_model(str(tmp_path)), dtype, CPU, cuda=cuda)
    assert torch.get_num_threads() == threads


def test_reads_that_return_less_than_was_asked_for_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path, BASE, seed=3)
    source, whole = resolve_model(str(tmp_path)), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: whole(file, [buffers[0][:77]], offset))
    assert_same(load_weights(source, torch.float32, CPU), copied(source, torch.float32))
