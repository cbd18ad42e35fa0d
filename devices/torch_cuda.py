"""CUDA by torch. Needs a GPU, except for `TorchCuda.is_available`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from devices.cuda import Event, HostCopy, MemoryFigures, Stream, TimedEvent


@dataclass(frozen=True, slots=True)
class _PinnedCopy:
    tensors: list[torch.Tensor]
    copied: Event

    def wait(self) -> list[torch.Tensor]:
        self.copied.synchronize()
        return self.tensors


class TorchCuda:
    """See `devices.cuda.Cuda`."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def init(self, index: int) -> torch.device:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def name(self, index: int) -> str:
        return torch.cuda.get_device_name(index)

    def uuid(self, index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    def memory(self, index: int) -> MemoryFigures:
        return MemoryFigures(
            total=torch.cuda.get_device_properties(index).total_memory,
            held=torch.cuda.memory_allocated(index),
            peak=torch.cuda.max_memory_allocated(index),
        )

    def reset_peak(self, index: int) -> None:
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)

    def zeros(self, num_bytes: int, index: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", index))

    def share(self, data: torch.Tensor) -> list[Any]:
        return list(data.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]

    def open(self, handle: Sequence[Any], index: int | None = None) -> torch.Tensor:
        # `_new_shared_cuda` does not initialise CUDA, and without it the process dies of a segmentation fault.
        # `torch.multiprocessing.reductions.rebuild_cuda_tensor` calls `_lazy_init` first for the same reason.
        at = handle[0] if index is None else index
        device = self.init(at)
        storage = torch.UntypedStorage._new_shared_cuda(at, *handle[1:])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def record(self, index: int) -> Event:
        return self._recorded(index, timed=False)

    def record_time(self, index: int) -> TimedEvent:
        return self._recorded(index, timed=True)

    @staticmethod
    def _recorded(index: int, *, timed: bool) -> TimedEvent:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return cast(TimedEvent, event)

    def to_host(self, tensors: Sequence[torch.Tensor], index: int) -> HostCopy:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        return _PinnedCopy(copies, self.record(index))

    def stream(self, index: int) -> Stream:
        return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def capturing(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()  # the driver refuses these calls by itself
