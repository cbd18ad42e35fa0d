"""The draw of tokens on GPUs, in one launch: no turn of top-p waits for the host (see `engine.model.token_draw`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.cuda_paged_attention import FUSED
from engine.model.token_draw import INCREMENT, MULTIPLIERS, Key, first_bits
from runtime.cuda import upload

_CHUNK = 4096


@triton.jit
def _sum_above(weights, floor, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of the weights above ``floor``."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, WIDTH, CHUNK):
        places = start + tl.arange(0, CHUNK)
        x = tl.load(weights + places, mask=places < WIDTH, other=0.0)
        total += tl.sum(tl.where(x > floor, x, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _draw_row(
    weights,  # [rows, WIDTH], float32
    keys,  # [rows], int64: the bits of turn 0
    wanted,  # [rows], float64
    tested,  # [rows], int64: whether top-p is below 1
    factors,  # [3], int64: increment and multipliers of SplitMix64
    out,  # [rows], int64
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights += row * WIDTH
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    increment = tl.load(factors).to(tl.uint64, bitcast=True)
    first = tl.load(factors + 1).to(tl.uint64, bitcast=True)
    second = tl.load(factors + 2).to(tl.uint64, bitcast=True)
    share = tl.load(wanted + row)
    is_tested = tl.load(tested + row) != 0
    floor = tl.full([], -1.0, tl.float32)  # tokens whose weight is not above it have been dropped
    total = _sum_above(weights, floor, WIDTH, CHUNK)
    counter = key
    bits = key
    token = tl.full([], -1, tl.int32)
    again = tl.full([], 1, tl.int32)
    while again > 0:
        target = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16 * total
        # The first token at which the running sum exceeds the target, or by rounding the last one of all.
        reached = tl.full([], 0.0, tl.float64)
        token = tl.full([], -1, tl.int32)
        last = tl.full([], 0, tl.int32)
        start = tl.full([], 0, tl.int32)
        while (token < 0) & (start < WIDTH):
            places = start + tl.arange(0, CHUNK)
            x = tl.load(weights + places, mask=places < WIDTH, other=0.0)
            left = (x > floor) & (x > 0.0)
            x = tl.where(left, x, 0.0).to(tl.float64)
            last = tl.maximum(last, tl.max(tl.where(left, places, 0), 0))
            chunk = tl.sum(x, 0)
            if reached + chunk > target:
                hit = left & (reached + tl.cumsum(x, 0) > target)
                token = tl.minimum(tl.min(tl.where(hit, places, WIDTH), 0), last)
            reached += chunk
            start += CHUNK
        token = tl.where(token < 0, last, token)
        weight = tl.load(weights + token)
        greater = _sum_above(weights, weight, WIDTH, CHUNK)
        # False where weights are not numbers.
        again = (is_tested & (greater >= share) & (greater > 0.0)).to(tl.int32)
        floor = weight
        total = greater
        counter += increment
        bits = (counter ^ (counter >> 30)) * first
        bits = (bits ^ (bits >> 27)) * second
        bits = bits ^ (bits >> 31)
    tl.store(out + row, token.to(tl.int64))


def draw_rows(
    weights: torch.Tensor, sums: torch.Tensor, wanted: torch.Tensor, keys: Sequence[Key], top_ps: Sequence[float]
) -> torch.Tensor:
    """See `engine.model.token_draw.DrawRows`. ``weights`` are float32."""
    count, width = weights.shape
    # One copy: three numbers of 64 bits per row.
    bits = np.array([first_bits(*key) for key in keys], np.uint64).view(np.int64)
    tested = np.array([top_p < 1.0 for top_p in top_ps], np.int64)
    factors = np.array([INCREMENT, *MULTIPLIERS], np.uint64).view(np.int64)
    inputs = upload(np.concatenate((bits, tested, factors)), torch.int64, weights.device)
    out = torch.empty(count, dtype=torch.int64, device=weights.device)
    first, flags, numbers = torch.split(inputs, [count, count, 3])
    _draw_row[(count,)](weights, first, wanted, flags, numbers, out, WIDTH=width, CHUNK=_CHUNK, num_warps=8, **FUSED)
    return out
