"""The decoder layer on GPUs: PyTorch's matrix products, and Triton kernels for what is between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from checkpoints.shape import Activation, ModelShape
from engine.kernels.cuda_paged_attention import FUSED
from engine.model.decoder import DecoderLayer
from engine.model.kv_pool import LayerKV
from engine.model.layers import (
    FP8_LEAST_ROW,
    FP8_MAX,
    FP8Linear,
    GatedMLP,
    GroupedExperts,
    Linear,
    LoopedExperts,
    Products,
    RMSNorm,
    RoutedExperts,
)
from engine.model.weights import ExpertWeights, Matrix, MLPWeights, QuantizedTensor

_HEADS = 8  # heads of one program of the rope kernel
_GATE_COLUMNS = 1024
_TILE = 64  # rows and columns of one program of the batch-invariant product


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < SIZE
    numbers = tl.load(x + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    numbers = numbers * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_rows(x, values, scales, least, largest, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < SIZE
    numbers = tl.load(x + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), least) / largest
    tl.store(scales + row, scale)
    tl.store(values + row * SIZE + columns, (numbers / scale).to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "x_row"])
def _tiled_product(
    x,  # [rows, SIZE]
    weight,  # [out_size, SIZE]
    bias,  # [out_size]
    out,  # [rows, out_size]
    rows,
    out_size,
    x_row,
    weight_row,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, SIZE, DEPTH):
        at = start + tl.arange(0, DEPTH)
        inside = at < SIZE
        left = tl.load(x + row[:, None] * x_row + at[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight + column[:, None] * weight_row + at[None, :],
            mask=(column < out_size)[:, None] & inside[None, :],
            other=0.0,
        )
        acc += tl.dot(left, tl.trans(right), input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + column, mask=column < out_size, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * out_size + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < out_size)[None, :],
    )


@triton.jit
def _gate_times(x, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZE
    gate = tl.load(x + row * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:
        # GELU by tanh: 0.5 * (1 + tanh(z)) is sigmoid(2 * z), with z = sqrt(2 / pi) * (x + 0.044715 * x**3). Below -80
        # the sigmoid is 0, and its exponential would overflow.
        gate = gate * tl.sigmoid(tl.maximum(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), -80.0))
    tl.store(out + row * SIZE + columns, (gate * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fp8(x):
    """``x`` in FP8, whose largest number is 448."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["slots"])
def _rotate_and_write(
    qkv,  # [rows, heads + 2 * kv_heads, HEAD_DIM]
    cos,  # [rows, HEAD_DIM]
    sin,
    norm,  # [heads + kv_heads, HEAD_DIM]
    slots,  # [rows], int32
    query,  # [rows, QUERY_HEADS, HEAD_DIM]
    keys,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_DIM], the blocks ``block_stride`` apart
    values,
    eps,
    block_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    half = HEAD_DIM // 2
    rotated = QUERY_HEADS + KV_HEADS
    mask = (heads < rotated + KV_HEADS)[:, None] & (dims < half)[None, :]
    place = (row * (rotated + KV_HEADS) + heads)[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(qkv + place, mask=mask, other=0.0)
    second = tl.load(qkv + place + half, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)
        normed = mask & (heads < rotated)[:, None]
        weights = norm + heads[:, None] * HEAD_DIM + dims[None, :]
        x = x * scale[:, None] * tl.load(weights, mask=normed, other=0.0).to(tl.float32)
        y = y * scale[:, None] * tl.load(weights + half, mask=normed, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HEAD_DIM + dims, mask=dims < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HEAD_DIM + half + dims, mask=dims < half, other=0.0).to(tl.float32)[None, :]
    turned_x = (x * c - y * s).to(first.dtype)
    turned_y = (y * c + x * s).to(first.dtype)
    is_query = mask & (heads < QUERY_HEADS)[:, None]
    to = query + (row * QUERY_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, turned_x, mask=is_query)
    tl.store(to + half, turned_y, mask=is_query)
    slot = tl.load(slots + row)
    if FP8:  # numbers that it cannot hold become its largest
        turned_x, turned_y, first, second = _fp8(turned_x), _fp8(turned_y), _fp8(first), _fp8(second)
    if slot >= 0:
        base = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE * HEAD_DIM
        is_key = mask & (heads >= QUERY_HEADS)[:, None] & (heads < rotated)[:, None]
        key = keys + base + (heads - QUERY_HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
        tl.store(key, turned_x, mask=is_key)
        tl.store(key + half, turned_y, mask=is_key)
        is_value = mask & (heads >= rotated)[:, None]
        value = values + base + (heads - rotated)[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
        tl.store(value, first, mask=is_value)
        tl.store(value + half, second, mask=is_value)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row of ``x`` (``[rows, hidden]``, contiguous) by its root mean square, and multiply by ``weight``."""
    rows, size = x.shape
    out = torch.empty_like(x)
    columns = triton.next_power_of_2(size)
    warps = 4 if columns <= 2048 else 8
    _rms_norm[(rows,)](x, weight, out, eps, SIZE=size, COLUMNS=columns, num_warps=warps, **FUSED)
    return out


def gate_times(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activated first half of each row of ``x`` (``[rows, 2 * size]``, contiguous) times the second half."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    columns = min(_GATE_COLUMNS, triton.next_power_of_2(size))
    _gate_times[(rows, triton.cdiv(size, columns))](
        x, out, SIZE=size, COLUMNS=columns, SILU=activation == "silu", num_warps=4, **FUSED
    )
    return out


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Turn the queries and keys of ``qkv`` by the angles of their rows, and write keys and values to the pool.

    ``qkv`` is ``[rows, heads + 2 * kv_heads, head_dim]`` and contiguous; ``cos`` and ``sin`` are those of
    `engine.model.rope.rope_tables`. ``norm`` (``[heads + kv_heads, head_dim]``), if given, norms queries and keys
    first. Row i goes to token ``slots[i] % block_size`` of block ``slots[i] // block_size`` of ``keys`` and ``values``
    (`engine.model.kv_pool.LayerKV`); a row whose slot is -1 is not written. Returns the turned queries,
    ``[rows, heads, head_dim]``.
    """
    rows, all_heads, head_dim = qkv.shape
    _, kv_heads, block_size, _ = keys.shape
    heads = all_heads - 2 * kv_heads
    query = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write[(rows, triton.cdiv(all_heads, _HEADS))](
        qkv,
        cos,
        sin,
        qkv if norm is None else norm,
        slots,
        query,
        keys,
        values,
        eps,
        keys.stride(0),
        QUERY_HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NORMED=norm is not None,
        FP8=keys.dtype is torch.float8_e4m3fn,
        HEADS=_HEADS,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
        **FUSED,
    )
    return query


class TiledLinear(Linear):
    """Products in tiles of a fixed size, each of which adds up its columns in order, so that the product of a row does
    not depend on how many rows there are."""

    def __init__(self, weight: Matrix, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, torch.Tensor)
        super().__init__(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        (rows, size), out_size = x.shape, self._weight.shape[0]
        out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
        bias = self._weight if self._bias is None else self._bias
        _tiled_product[(triton.cdiv(rows, _TILE), triton.cdiv(out_size, _TILE))](
            *(x, self._weight, bias, out, rows, out_size, x.stride(0), self._weight.stride(0)),
            SIZE=size,
            TILE=_TILE,
            DEPTH=_TILE if x.dtype.itemsize <= 2 else _TILE // 2,
            BIASED=self._bias is not None,
            num_warps=4,
            num_stages=3,
            **FUSED,
        )
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


class CUDAFP8Linear(FP8Linear):
    """Quantizes rows in one kernel."""

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        rows, size = x.shape
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        columns = triton.next_power_of_2(size)
        _quantize_rows[(rows,)](
            *(x, values, scales, FP8_LEAST_ROW, FP8_MAX),
            SIZE=size,
            COLUMNS=columns,
            num_warps=4 if columns <= 2048 else 8,
            **FUSED,
        )
        return values, scales


def cuda_linear(weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """`engine.model.layers.Products` of GPUs."""
    return CUDAFP8Linear(weight, bias) if isinstance(weight, QuantizedTensor) else Linear(weight, bias)


class CUDAMLP(GatedMLP):
    """The MLP on GPUs. Gate and up are one product."""

    def __init__(self, weights: MLPWeights, activation: Activation, products: Products) -> None:
        self._gate_up = products(weights.gate_up, weights.gate_up_bias)
        self._down = products(weights.down, weights.down_bias)
        self._activation = activation

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return gate_times(self._gate_up(x), self._activation)


class CUDALayer(DecoderLayer):
    """A decoder layer for steps of `engine.kernels.cuda_attention`."""

    scales_queries = False

    @staticmethod
    def products(batch_invariant: bool) -> Products:
        return TiledLinear if batch_invariant else cuda_linear

    def _make_mlp(
        self, weights: MLPWeights | ExpertWeights, shape: ModelShape, batch_invariant: bool
    ) -> GatedMLP | RoutedExperts:
        products = self.products(batch_invariant)
        if isinstance(weights, MLPWeights):
            return CUDAMLP(weights, shape.activation, products)
        assert shape.experts is not None
        plain = isinstance(weights.gate_up, torch.Tensor) and isinstance(weights.down, torch.Tensor)
        if plain and not batch_invariant:
            return GroupedExperts(weights, shape.experts, shape.activation, products)
        return LoopedExperts(weights, shape.experts, shape.activation, products, CUDAMLP)

    def normed(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        return x if norm is None else rms_norm(x.contiguous(), norm.weight, norm.eps)

    def _rotate_and_write(
        self, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], kv: LayerKV, slots: torch.Tensor
    ) -> torch.Tensor:
        return rotate_and_write(qkv, *angles, self.qk_norm, self.eps, slots, kv.k, kv.v)
