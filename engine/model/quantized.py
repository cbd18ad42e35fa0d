"""Matrices in 8 bits with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix, or several of the same size: ``values`` (``[..., rows, columns]``, int8 or float8) times ``scales``
    (``[..., rows, groups]``, float32). A scale is shared by ``group`` columns of its row (None: by all)."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int | None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in ``dtype``, multiplied in float32."""
        scales = self.scales
        if self.group is not None:
            scales = scales.repeat_interleave(self.group, dim=-1)[..., : self.values.shape[-1]]
        return (self.values.float() * scales).to(dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where the matrix is."""
        return self.values.device

    def split(self, sizes: Sequence[int]) -> tuple[QuantizedTensor, ...]:
        """Views of consecutive rows (of the first dimension)."""
        parts = zip(torch.split(self.values, list(sizes)), torch.split(self.scales, list(sizes)), strict=True)
        return tuple(QuantizedTensor(values, scales, self.group) for values, scales in parts)

    def chunk(self, count: int) -> tuple[QuantizedTensor, ...]:
        """Views of ``count`` equal parts of the rows."""
        return self.split([self.shape[0] // count] * count)


Matrix = torch.Tensor | QuantizedTensor
"""A matrix of weights, plain or quantized."""


def unbind(matrices: Matrix) -> Sequence[Matrix]:
    """The matrices along the first dimension."""
    if isinstance(matrices, torch.Tensor):
        return matrices.unbind()
    parts = zip(matrices.values.unbind(), matrices.scales.unbind(), strict=True)
    return [QuantizedTensor(values, scales, matrices.group) for values, scales in parts]
