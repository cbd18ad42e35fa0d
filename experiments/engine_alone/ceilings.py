"""What the device can do at all, measured: the rate of a large product, and the rate of reading memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from engine.model.linear import linear

_READ_BYTES = 400 * 2**20
_PRODUCT = 2048
_REPEATS = 3


class Ceilings:
    """Of ``device``, with the threads that torch has now. Products are in ``dtype``."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._device = device
        self._memory = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
        self._square = torch.randn((_PRODUCT, _PRODUCT), device=device).to(dtype)
        self._packed = linear(self._square.clone())

    @torch.inference_mode()
    def product_flops(self, repeats: int = _REPEATS) -> float:
        """Floating point operations per second of a bare product."""
        return 2 * _PRODUCT**3 / self.median_s(lambda: self._square @ self._square, repeats)

    @torch.inference_mode()
    def packed_flops(self, repeats: int = _REPEATS) -> float:
        """The same for a product with a weight in the form in which the engine keeps weights."""
        return 2 * _PRODUCT**3 / self.median_s(lambda: self._packed(self._square), repeats)

    @torch.inference_mode()
    def read_bytes_per_s(self, repeats: int = _REPEATS) -> float:
        """Bytes per second that a sum over memory reads."""
        return _READ_BYTES / self.median_s(lambda: self._memory.sum(), repeats)

    def median_s(self, work: Callable[[], object], repeats: int = _REPEATS) -> float:
        """The median time of ``work`` after a first call that is not counted."""
        work()
        times: list[float] = []
        for _ in range(repeats):
            self._synchronize()
            started_s = time.perf_counter()
            work()
            self._synchronize()
            times.append(time.perf_counter() - started_s)
        return statistics.median(times)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
