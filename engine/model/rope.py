"""Rotary position embeddings: the tables (plain, linear and Llama 3 scaling) and their application."""

from __future__ import annotations

import math

import torch

from engine.model.shape import ModelShape


def rope_tables(
    shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, each ``[positions, 1, head_dim]``, computed in float32 like the reference does. Both
    halves have the same angles; the first half's sines are negative, as `rotate_` wants them."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _inverse_frequencies(shape))
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(device, dtype).unsqueeze(1), sin.to(device, dtype).unsqueeze(1)


def head_factors(heads: int, kv_heads: int, scale: float, device: torch.device) -> torch.Tensor:
    """What `spread` multiplies each head's angles by: ``scale`` for the queries (the first ``heads``), 1 for the keys;
    float32, ``[1, heads + kv_heads, 1]``."""
    return torch.tensor([scale] * heads + [1.0] * kv_heads, device=device).view(1, -1, 1)


def spread(cos: torch.Tensor, sin: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The angles of a step's rows (``[rows, 1, head_dim]``) for each head of ``factors`` (``[1, heads, 1]``), so that
    `rotate_` runs over whole rows at a time: ``[rows, heads, head_dim]``. Turned by them, a head is also multiplied by
    its factor."""
    return (cos * factors).to(cos.dtype), (sin * factors).to(sin.dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn ``x`` (``[rows, heads, head_dim]``) in place by the angles of its rows (the same shape, or 1 head): number i
    of a head pairs with number i + head_dim / 2."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, sin)


def _inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: long waves are stretched, short ones kept, those between blended.
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, scaled)
