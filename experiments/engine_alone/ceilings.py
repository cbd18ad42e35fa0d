"""What the device can do at all, measured: the rate of a large product, and the rate of reading memory.

On a GPU the work is large enough that launches do not matter, and CUDA events take the times."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.model.layers import linear
from runtime.cuda import Cuda

_REPEATS = 3
_TICK_S = 0.5e-6  # the resolution of CUDA's events


class Sizes(NamedTuple):
    """Of what is measured: the bytes that are read, and the rows and columns of the product's matrices."""

    read_bytes: int
    product: int


CPU_SIZES = Sizes(400 * 2**20, 2048)
QUICK_SIZES = Sizes(16 * 2**20, 256)  # for what only has to run: a CPU without bfloat16 takes seconds for the others
GPU_SIZES = Sizes(4 * 2**30, 8192)  # an H200 reads them in 1 ms; a launch takes 5 us


class Ceilings:
    """Of ``device``, with the threads that torch has now. Products are in ``dtype``. ``cuda`` is how a GPU is reached
    (default: torch), ``sizes`` those of the measurements (default: by device)."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        *,
        cuda: Cuda | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self._index, self._cuda = device.index or 0, None
        if device.type == "cuda":
            self._cuda = cuda or Cuda()
            device = self._cuda.init(self._index)
        self.device = device
        """Where its tensors lie."""
        self._sizes = sizes or (GPU_SIZES if self._cuda is not None else CPU_SIZES)
        self._memory = torch.ones(self._sizes.read_bytes // 8, dtype=torch.int64, device=device)
        self._square = torch.randn((self._sizes.product, self._sizes.product), device=device).to(dtype)
        # On GPUs the engine keeps weights as they are.
        self._packed = linear(self._square.clone()) if self._cuda is None else None

    @torch.inference_mode()
    def product_flops(self, repeats: int = _REPEATS, *, packed: bool = False) -> float:
        """Floating point operations per second of a bare product; or of one with a weight in the form in which the
        engine keeps weights."""
        square, weight = self._square, self._packed if packed else None
        multiply = (lambda: square @ square) if weight is None else (lambda: weight(square))
        return float(2 * self._sizes.product**3 / self.median_s(multiply, repeats))

    @torch.inference_mode()
    def read_bytes_per_s(self, repeats: int = _REPEATS) -> float:
        """Bytes per second that a sum over memory reads. On a GPU, a copy from one half of the memory to the other is
        measured as well, which reads and writes as many bytes; the better rate counts."""
        times_s = [self.median_s(self._memory.sum, repeats)]
        if self._cuda is not None:
            first, second = self._memory.chunk(2)
            times_s.append(self.median_s(lambda: first.copy_(second), repeats))
        return self._sizes.read_bytes / min(times_s)

    def median_s(self, work: Callable[[], object], repeats: int = _REPEATS) -> float:
        """The median time of ``work`` after a first call that is not counted."""
        return statistics.median([self._time_s(work) for _ in range(repeats + 1)][1:])

    def _time_s(self, work: Callable[[], object]) -> float:
        if self._cuda is None:
            return timeit.timeit(work, number=1)
        started = self._cuda.record(self._index, timed=True)
        work()
        ended = self._cuda.record(self._index, timed=True)
        ended.synchronize()
        return max(started.elapsed_time(ended) / 1e3, _TICK_S)
