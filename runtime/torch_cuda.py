"""CUDA by torch. Needs a GPU, except for `TorchCuda.is_available`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from runtime.cuda import Event, Graph, MemoryFigures, Stream


class TorchCuda:
    """See `runtime.cuda.Cuda`."""

    def __init__(self) -> None:
        self._recorders: dict[int, torch.cuda.Stream] = {}  # one per GPU: graphs share memory within a stream only

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
            free=torch.cuda.mem_get_info(index)[0],
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

    def record(self, index: int, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return cast(Event, event)

    def to_host(self, tensors: Sequence[torch.Tensor], index: int) -> Callable[[], list[torch.Tensor]]:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        copied = self.record(index)

        def wait() -> list[torch.Tensor]:
            copied.synchronize()
            return copies

        return wait

    def stream(self, index: int) -> Stream:
        return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def record_graph(self, work: Callable[[], object], index: int, beside: Graph | None = None) -> Graph:
        if index not in self._recorders:
            self._recorders[index] = cast(torch.cuda.Stream, self.stream(index))
        recorder, current = self._recorders[index], torch.cuda.current_stream(index)
        recorder.wait_stream(current)
        with torch.cuda.stream(recorder):
            work()
        current.wait_stream(recorder)
        torch.cuda.synchronize(index)
        graph = torch.cuda.CUDAGraph()
        memory = None if beside is None else cast(torch.cuda.CUDAGraph, beside).pool()
        with torch.cuda.graph(graph, pool=memory, stream=recorder):
            work()
        return graph
