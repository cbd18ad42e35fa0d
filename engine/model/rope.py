"""Rotary position embeddings: tables (plain, linear and Llama 3 scaling) and their application."""

from __future__ import annotations

import math

import torch

from engine.model.shape import ModelShape


def rope_tables(
    shape: ModelShape, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, each ``[positions, 1, head_dim]``, computed in float32 as in transformers. Both halves
    have the same angles; the sines of the first half are negated, as `rotate_` requires."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _inverse_frequencies(shape))
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(device, dtype).unsqueeze(1), sin.to(device, dtype).unsqueeze(1)


def head_factors(heads: int, kv_heads: int, scale: float, device: torch.device) -> torch.Tensor:
    """The factors for `spread`: ``scale`` for query heads, 1 for key heads; float32, ``[1, heads + kv_heads, 1]``."""
    return torch.tensor([scale] * heads + [1.0] * kv_heads, device=device).view(1, -1, 1)


def spread(cos: torch.Tensor, sin: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand the angles of rows (``[rows, 1, head_dim]``) to all heads of ``factors`` (``[1, heads, 1]``), and multiply
    them by these factors: ``[rows, heads, head_dim]``. So `rotate_` processes whole rows and scales the heads."""
    return (cos * factors).to(cos.dtype), (sin * factors).to(sin.dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn ``x`` (``[rows, heads, head_dim]``) in place. ``cos`` and ``sin`` have the same shape, or 1 head. In each
    head, number i pairs with number i + head_dim / 2."""
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
