"""Root mean square norms."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """Divides each row of ``x`` (``[rows, hidden]``) by its root mean square and multiplies it by ``weight``
    (``[hidden]``) plus ``offset``. With an offset the sum is kept in float32, as it would lose digits of the weight.

    In bfloat16 the arithmetic is in float32 and the result is rounded once, in as few passes as possible:
    ``x / hypot(|x|, sqrt(hidden * eps)) * (weight * sqrt(hidden))`` is the same number. For a single row on a CPU the
    number of calls dominates, so it uses a layer norm: ``(x, -x)`` has mean 0 and the mean square of ``x``.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self._dtype = weight.dtype
        self.weight = weight if offset == 0.0 else weight.float() + offset
        self.eps = eps
        if self._dtype is torch.bfloat16:
            hidden = weight.shape[0]
            self._weight_twice = torch.cat((self.weight, self.weight))
            self._scaled_weight = self.weight.float() * hidden**0.5
            self._least = torch.tensor((hidden * eps) ** 0.5, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            if self.weight.dtype is x.dtype:
                return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
            return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        if x.shape[0] == 1 and x.device.type == "cpu":
            twice = torch.cat((x, -x), dim=-1)
            return functional.layer_norm(twice, self._weight_twice.shape, self._weight_twice, None, self.eps)[
                :, : x.shape[1]
            ]
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div_(torch.hypot(length, self._least)).mul_(self._scaled_weight).to(x.dtype)
