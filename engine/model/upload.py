"""Copies numbers of the host to the device of a step without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` as a tensor on ``device``.

    A copy from ordinary memory would wait for everything that the GPU was given before. This one comes from pinned
    memory of its own, which PyTorch keeps until the copy is done and gives to no other step before.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
