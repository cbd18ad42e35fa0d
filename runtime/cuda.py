"""The CUDA calls of pdserve: start, memory, sharing between processes, events, streams, graphs, and synchronisation.

They need a GPU, except for `Cuda.is_available`. `tests.strict_cuda.StrictGpus` checks their order without one. GPUs are
named by their index in this process, so that calls need no tensors.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

_NON_BLOCKING, _HIGHEST = 1, -100  # CU_STREAM_NON_BLOCKING; CUDA takes the highest priority that the GPU has


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a GPU in bytes: ``total`` is the device's, ``free`` what no process has taken, ``held`` what this
    process has allocated, and ``peak`` the most that it had allocated since `Cuda.reset_peak`."""

    total: int
    free: int
    held: int
    peak: int


class Event(Protocol):
    """A point in a stream of a GPU."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until the GPU has passed it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``, a later one. Both are timed, and the GPU must have passed both."""
        ...


class Stream(Protocol):
    """A queue of a GPU's work, beside its default one: see `Cuda.stream`."""

    def synchronize(self) -> None:
        """Wait until the GPU has done all of it."""
        ...


class Graph(Protocol):
    """Recorded work of a GPU: see `Cuda.record_graph`."""

    def replay(self) -> None:
        """Launch it in the current stream. It uses the memory that it used when it was recorded."""
        ...


class Cuda:
    """CUDA in this process, by torch. Every call but `is_available` needs `init` before it, in the same thread or
    another."""

    def __init__(self) -> None:
        self._recorders: dict[int, torch.cuda.Stream] = {}  # one per GPU: graphs share memory within a stream only
        self._spare: dict[int, list[Stream]] = defaultdict(list)  # by GPU: streams that were given back

    def is_available(self) -> bool:
        """Whether this process sees a GPU. Does not initialise CUDA."""
        return torch.cuda.is_available()

    def init(self, index: int) -> torch.device:
        """Initialise CUDA in this process, and make GPU ``index`` the current one of this thread. Returns it as a
        device of tensors. May be called again."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def name(self, index: int) -> str:
        """The name of the GPU's model."""
        return torch.cuda.get_device_name(index)

    def uuid(self, index: int) -> str:
        """Identifies the GPU in all processes."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def memory(self, index: int) -> MemoryFigures:
        """The memory of GPU ``index``."""
        return MemoryFigures(
            total=torch.cuda.get_device_properties(index).total_memory,
            free=torch.cuda.mem_get_info(index)[0],
            held=torch.cuda.memory_allocated(index),
            peak=torch.cuda.max_memory_allocated(index),
        )

    def reset_peak(self, index: int) -> None:
        """Begin a new peak for `memory`. Memory that is cached, but not in use, goes back to the GPU."""
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)

    def free_cached(self) -> None:
        """Give memory that is cached, but not in use, back to the GPU."""
        torch.cuda.empty_cache()

    def zeros(self, num_bytes: int, index: int) -> torch.Tensor:
        """Allocate ``num_bytes`` zeros (uint8). torch's OutOfMemoryError if there is no room."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", index))

    def share(self, data: torch.Tensor) -> list[Any]:
        """A handle with which other processes open the memory of ``data``, which must exist for as long as they
        do."""
        return list(data.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]

    def open(self, handle: Sequence[Any], index: int | None = None) -> torch.Tensor:
        """Open the memory behind another process's handle (uint8). ``index`` is the GPU's index here, if it may differ
        from its index there. RuntimeError, TypeError or ValueError if that fails."""
        # `_new_shared_cuda` does not initialise CUDA, and without it the process dies of a segmentation fault.
        # `torch.multiprocessing.reductions.rebuild_cuda_tensor` calls `_lazy_init` first for the same reason.
        at = handle[0] if index is None else index
        device = self.init(at)
        storage = torch.UntypedStorage._new_shared_cuda(at, *handle[1:])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def record(self, index: int, *, timed: bool = False) -> Event:
        """Record an event in the current stream of GPU ``index``. The GPU notes the time of one that is ``timed``."""
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return cast(Event, event)

    def to_host(self, tensors: Sequence[torch.Tensor], index: int) -> Callable[[], list[torch.Tensor]]:
        """Have the current stream of GPU ``index`` copy ``tensors`` to memory of their own on the host. Does not wait,
        and neither does anything that is launched later. Returns a function that waits until the GPU has computed and
        copied them, and returns the copies; without tensors, it waits until the GPU has come here."""
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        copied = self.record(index)

        def wait() -> list[torch.Tensor]:
            copied.synchronize()
            return copies

        return wait

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory of the host (uint8) that GPUs copy from while the host does other work."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, source: torch.Tensor, target: torch.Tensor, index: int) -> Callable[[], None]:
        """Have the current stream of GPU ``index`` copy ``source``, which is `pinned`, to ``target``, which has its
        dtype. Does not wait. Returns a function that waits until the GPU has copied it; until then ``source`` must not
        change."""
        target.copy_(source, non_blocking=True)
        return self.record(index).synchronize

    def stream(self, index: int) -> Stream:
        """A stream of GPU ``index`` for the caller alone, until `give_back`. Its work does not wait for that of other
        streams, and vice versa, and comes before work of ordinary priority. RuntimeError if CUDA makes none.

        A `torch.cuda.Stream` is one of 32, which are given out in turn: the 33rd shares the work queue of the first."""
        if self._spare[index]:
            return self._spare[index].pop()
        torch.cuda.mem_get_info(index)  # makes the GPU's context the current one of this thread
        made = ctypes.c_void_p()
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, _HIGHEST)
        if code:
            raise RuntimeError(f"CUDA makes no stream (error {code} of cuStreamCreateWithPriority)")
        return torch.cuda.ExternalStream(made.value, torch.device("cuda", index))  # type: ignore[no-untyped-call]

    def give_back(self, stream: Stream, index: int) -> None:
        """Return a stream from `stream` whose work is done, to be reused."""
        self._spare[index].append(stream)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make ``stream`` the current one of its GPU, and its GPU the current one of this thread."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def synchronize(self, index: int) -> None:
        """Wait until GPU ``index`` has computed everything that this process has launched."""
        torch.cuda.synchronize(index)

    def record_graph(self, work: Callable[[], object], index: int, beside: Graph | None = None) -> Graph:
        """Run ``work``, so that its kernels are compiled and its workspaces exist, then run it again and record what it
        launches on GPU ``index``. While it is recorded, nothing may synchronise, allocate by `zeros`, or be shared.
        Memory of intermediate results is shared with ``beside``, a graph of the same GPU that never runs at the same
        time."""
        if index not in self._recorders:
            self._recorders[index] = torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]
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


def upload(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``values`` as a tensor on ``device``.

    A copy from ordinary memory would wait for everything that the GPU was given before. This one comes from pinned
    memory of its own, which PyTorch keeps until the copy is done and gives to no other step before.
    """
    host = torch.as_tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
