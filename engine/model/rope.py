"""Rotary position embeddings: tables (plain, and with each kind of scaling) and their application."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from checkpoints.shape import ModelShape, Rope, RopeScaling


def rope_tables(
    rope: Rope, shape: ModelShape, positions: int, long_rope: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, each ``[positions, 1, head_dim]``, computed in float32 as in transformers. Both halves
    have the same angles; the sines of the first half are negated, as `rotate_` requires. Where ``rope`` turns a part of
    each head only, the others have the angle 0, in the order of `engine.model.weights.ModelWeights.arrange`.
    ``long_rope`` selects the long factors of longrope."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(rope, shape.rotary_dim, long_rope))
    cos, sin = angles.cos() * rope.scaling.attention_factor, angles.sin() * rope.scaling.attention_factor
    unturned = (shape.head_dim - shape.rotary_dim) // 2
    cos, sin = functional.pad(cos, (0, unturned), value=1.0), functional.pad(sin, (0, unturned))
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


def _frequencies(rope: Rope, rotary_dim: int, long_rope: bool) -> torch.Tensor:
    """The angle per position of each pair of dimensions: ``[rotary_dim / 2]``."""
    scaling = rope.scaling
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if scaling.kind == "longrope":
        factors = torch.tensor(scaling.long_factors if long_rope else scaling.short_factors)
        return 1.0 / (factors * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, rope.theta)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, scaled)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Pairs that turn often within the original context are kept, those that turn less than once are stretched, and a
    linear ramp over the pairs blends those between."""
    pairs = frequencies.shape[0]

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return pairs * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
