"""Root mean square norms."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """Divides each row of ``x`` (``[rows, hidden]``) by its root mean square and multiplies it by ``weight``
    (``[hidden]``).

    In bfloat16 all of it happens in float32 and is rounded once, in as few passes as there can be:
    ``x / hypot(|x|, sqrt(hidden * eps)) * (weight * sqrt(hidden))`` is the same number. Of a single row the number of
    calls is what counts: ``(x, -x)`` has the mean 0 and the mean square of ``x``, so that its layer norm is what is
    wanted, twice.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        if weight.dtype is torch.bfloat16:
            hidden = weight.shape[0]
            self._weight_twice = torch.cat((weight, weight))
            self._scaled_weight = weight.float() * hidden**0.5
            self._least = torch.tensor((hidden * eps) ** 0.5, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        if x.shape[0] == 1 and x.device.type == "cpu":
            twice = torch.cat((x, -x), dim=-1)
            return functional.layer_norm(twice, self._weight_twice.shape, self._weight_twice, None, self.eps)[
                :, : x.shape[1]
            ]
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div_(torch.hypot(length, self._least)).mul_(self._scaled_weight).to(x.dtype)
