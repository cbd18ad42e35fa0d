"""Every kernel, as real models launch it, through Triton's compiler for several GPUs; none is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.kernels import cuda_layer, cuda_paged_attention, cuda_top_p
from engine.model.weights import QuantizedTensor
from tests.engine.cuda.conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory that one program may have, by compute capability.
SHARED_BYTES = {75: 64 * 1024, 80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
MODELS = {  # heads, KV heads, head dim, hidden, intermediate, block size, dtype
    "gemma-2-2b": (8, 4, 256, 2304, 9216, 64, torch.bfloat16),
    "llama-3-8b": (32, 8, 128, 4096, 14_336, 64, torch.bfloat16),
    "smollm-135m": (9, 3, 64, 576, 1536, 16, torch.bfloat16),
    "smollm-135m-float16": (9, 3, 64, 576, 1536, 16, torch.float16),
    "odd": (4, 4, 24, 96, 100, 20, torch.float32),
}


class Recorder:
    """Stands for a kernel and compiles what it is launched with."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel = kernel
        self._capability = capability
        self.compiled = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < n < 2**16 for n in grid[1:]), "only the first dimension of a grid may be large"
        return self._launch

    def _launch(self, *args: Any, **keywords: Any) -> None:
        names = self._kernel.arg_names
        constants = {name: keywords.pop(name) for name in names[len(args) :]}
        signature: dict[str, str] = {name: "constexpr" for name in constants}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for i, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name], divisible = TYPES[value.dtype], value.dtype is not torch.int32
            else:
                signature[name], divisible = ("i32", value % 16 == 0) if isinstance(value, int) else ("fp32", False)
            if divisible:
                attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, {name: signature[name] for name in names}, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=keywords)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES[self._capability]
        self.compiled += 1


@pytest.fixture
def kernels(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Recorder]:
    """Recorders in place of all kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders: list[Recorder] = []

    def stand_in(module: ModuleType, name: str) -> None:
        recorders.append(Recorder(getattr(module, name), capability))
        monkeypatch.setattr(module, name, recorders[-1])

    monkeypatch.setattr(cuda_paged_attention, "capability_of", lambda device: divmod(capability, 10))
    stand_in(cuda_paged_attention, "_attend_split")
    stand_in(cuda_paged_attention, "_attend_tile")
    stand_in(cuda_top_p, "_draw_row")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name in (
        "_rms_norm",
        "_gate_times",
        "_rotate_and_write",
        "_tiled_product",
        *(["_quantize_rows"] if capability >= 89 else []),
    ):
        stand_in(cuda_layer, name)
    return recorders


@pytest.mark.parametrize(
    ("model", "capability"),
    [
        ("smollm-135m-float16", 75),
        ("smollm-135m", 89),
        ("odd", 100),
        *(
            pytest.param(model, capability, marks=pytest.mark.soak)
            for model, capability in (
                ("llama-3-8b", 80),
                ("llama-3-8b", 90),
                ("llama-3-8b", 100),
                ("gemma-2-2b", 100),
                ("gemma-2-2b", 80),
                ("gemma-2-2b", 90),
            )
        ),
    ],
)
def test_kernels_compile(model: str, kernels: list[Recorder]) -> None:
    heads, kv_heads, head_dim, hidden, intermediate, block_size, dtype = MODELS[model]

    def meta(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    keys, values = meta(100, 2, 2, kv_heads, block_size, head_dim)[:, 1].unbind(1)
    rows = 8
    slots, contexts = meta(rows, dtype=torch.int32), meta(rows, dtype=torch.int32)
    arrivals = meta(rows * kv_heads, dtype=torch.int32)
    tables, tiles = meta(rows, 64, dtype=torch.int32), meta(5, 4, dtype=torch.int32)
    qkv = meta(rows, heads + 2 * kv_heads, head_dim)
    cos = sin = meta(rows, 1, head_dim)
    query = cuda_layer.rotate_and_write(qkv, cos, sin, meta(heads + kv_heads, head_dim), 1e-5, slots, keys, values)
    out = meta(rows, heads, head_dim)
    softcap = 50.0 if model in ("gemma-2-2b", "odd") else None
    cuda_paged_attention.attend_decodes(query, keys, values, tables, contexts, 2**30, 0.125, 16, arrivals, out, softcap)
    for window in (None, 4096):
        cuda_paged_attention.attend_chunks(query, keys, values, tables, tiles, window, 0.125, out, softcap)
    cuda_layer.rms_norm(meta(rows, hidden), meta(hidden), 1e-5)
    cuda_layer.gate_times(meta(rows, 2 * intermediate), "gelu_tanh" if softcap else "silu")
    cuda_layer.TiledLinear(meta(intermediate, hidden), meta(intermediate))(meta(rows, hidden))
    if len(kernels) == 8:  # with those of FP8
        keys, values = meta(100, 2, 2, kv_heads, block_size, head_dim, dtype=torch.float8_e4m3fn)[:, 1].unbind(1)
        cuda_layer.rotate_and_write(qkv, cos, sin, None, 1e-5, slots, keys, values)
        cuda_paged_attention.attend_decodes(query, keys, values, tables, contexts, 2**30, 0.125, 16, arrivals, out)
        cuda_paged_attention.attend_chunks(query, keys, values, tables, tiles, None, 0.125, out)
        weight = QuantizedTensor(meta(32, hidden, dtype=torch.float8_e4m3fn), meta(32, 1, dtype=torch.float32), None)
        cuda_layer.CUDAFP8Linear(weight).quantized(meta(rows, hidden))
    weights = meta(1, 128 * 1024 + 512, dtype=torch.float32)
    cuda_top_p.draw_rows(weights, meta(1, 257, dtype=torch.float32), meta(1, dtype=torch.float64), [(1, 5)], [0.9])
    assert all(kernel.compiled for kernel in kernels)
