"""CUDA without a GPU, on tensors of the host, that raises where real CUDA would crash, hang or corrupt memory.

`StrictGpus` are the GPUs of a host, and each `StrictCuda` is one process's access to them. Several may live in one
process of the operating system, so that a test can play an engine, its worker and a peer.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.cuda import Cuda, Graph, MemoryFigures, Stream
from tests.strict_streams import POISON, StrictStream, current_stream

_TORCH_STREAMS = 32  # c10::cuda::kStreamsPerPool


class CudaMisuse(Exception):
    """A call that real CUDA punishes."""


@dataclass(eq=False)
class _Shared:
    """Memory that a process has shared. ``readers`` are the other processes that have it open."""

    owner: StrictCuda
    index: int
    buffer: bytearray
    readers: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class _Allocated:
    """A tensor of a process, by its storage; the buffer outlives it, so that its address is not given out again."""

    storage: weakref.ref[torch.UntypedStorage]
    buffer: bytearray
    index: int
    num_bytes: int


class StrictGpus:
    """``num_gpus`` GPUs of ``total_bytes`` each. ``allocator_settings`` are those of PYTORCH_CUDA_ALLOC_CONF."""

    def __init__(self, num_gpus: int = 1, total_bytes: int = 2**30, allocator_settings: str = "") -> None:
        self.num_gpus, self.total_bytes, self.allocator_settings = num_gpus, total_bytes, allocator_settings
        self.shared: dict[str, _Shared] = {}
        self.misuses: list[str] = []
        """What went wrong where no call could raise: memory that was freed under a reader."""
        self._numbers = itertools.count()

    def process(self, visible: Sequence[int] | None = None, multiprocessors: int = 132) -> StrictCuda:
        """A process that sees the GPUs ``visible``, in this order (default: all), and may use ``multiprocessors`` of
        each, as MPS limits them."""
        return StrictCuda(self, range(self.num_gpus) if visible is None else visible, multiprocessors)

    def check(self) -> None:
        """Raise `CudaMisuse` if memory was freed while another process had it open."""
        if self.misuses:
            raise CudaMisuse("; ".join(self.misuses))

    def add(self, shared: _Shared) -> str:
        """Register shared memory; returns its handle."""
        handle = f"memory-{next(self._numbers)}"
        self.shared[handle] = shared
        return handle


class StrictEvent:
    """An event in the current stream of GPU ``index``. In the default stream it has always passed; in a side stream it
    passes when it is waited for. ``time_s``: when it was recorded, if it is timed."""

    def __init__(self, cuda: StrictCuda, index: int, time_s: float | None = None) -> None:
        self._cuda, self.index, self._time_s, self._waited_for = cuda, index, time_s, False
        self._stream = current_stream()
        self._length = 0 if self._stream is None else self._stream.length

    def query(self) -> bool:
        """Whether it has passed. `CudaMisuse` if the current GPU is another one."""
        self._cuda.use(self.index, "an event is queried", same_device=True)
        return self._stream is None or self._stream.is_done(self._length)

    def synchronize(self) -> None:
        """`CudaMisuse` while a graph is recorded, or if the current GPU is another one."""
        self._cuda.use(self.index, "an event is waited for", same_device=True, synchronises=True)
        if self._stream is not None:
            self._stream.run(self._length)
        self._waited_for = True

    def elapsed_time(self, end: StrictEvent) -> float:
        """Milliseconds by this host's clock. `CudaMisuse` if one of the two is not timed, if they belong to different
        GPUs, or if the later one was not waited for."""
        self._cuda.use(self.index, "a time is read", same_device=True)
        if self._time_s is None or end._time_s is None:
            raise CudaMisuse("the time of an event without timing is read: invalid resource handle")
        if (end._cuda, end.index) != (self._cuda, self.index):
            raise CudaMisuse("the time between events of two GPUs is read: invalid resource handle")
        if not end._waited_for:
            raise CudaMisuse("the time of an event is read that has not passed: device not ready")
        return (end._time_s - self._time_s) * 1e3


class StrictHostCopy:
    """Copies of ``tensors``, as a stream takes them at its place in it: later changes do not show."""

    def __init__(self, cuda: StrictCuda, tensors: Sequence[torch.Tensor], index: int) -> None:
        self._cuda, self.index = cuda, index
        self._tensors = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[torch.Tensor]:
        """The copies. `CudaMisuse` while a graph is recorded, or if the current GPU is another one."""
        self._cuda.use(self.index, "a copy is waited for", same_device=True, synchronises=True)
        return self._tensors


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's operations while a graph is recorded: `CudaMisuse` for those that wait for numbers. Copies to the host
    (`tolist`, `cpu`) are not noticed, because the tensors are there already."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            raise CudaMisuse(f"{func} while a graph is recorded: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def _waits(func: Any, args: Any) -> bool:
    """Whether an operation of torch needs numbers on the host: the result's, or for its shape."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):  # by masks
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class StrictGraph:
    """``work``, which each `replay` does again: memory is that of the recording only if ``work`` keeps it. Unlike a
    GPU, the recording computes, too."""

    def __init__(self, cuda: StrictCuda, work: Callable[[], object], index: int) -> None:
        self.cuda, self.index, self._work = cuda, index, work

    def replay(self) -> None:
        """Do the work. `CudaMisuse` if the current GPU is another one."""
        self.cuda.use(self.index, "a graph is replayed", same_device=True)
        self._work()


class StrictCuda(Cuda):
    """Overrides all calls. Tensors are on the host. ``calls`` are the names of all calls so far."""

    def __init__(self, gpus: StrictGpus, visible: Sequence[int], multiprocessors: int) -> None:
        super().__init__()
        self._gpus, self._visible = gpus, list(visible)
        self._current: int | None = None
        self._capturing = False
        self._tensors: dict[int, _Allocated] = {}
        self._peaks: dict[int, int] = {}
        self._streams: dict[int, list[StrictStream]] = {}
        self._torch_streams: dict[int, list[StrictStream]] = defaultdict(list)
        self.calls: list[str] = []
        self.pinned_storages: list[torch.UntypedStorage] = []
        """All memory that was pinned so far."""
        self._multiprocessors, self._changed = multiprocessors, threading.Condition()

    @contextmanager
    def resident(self, blocks: int, wait_s: float) -> Iterator[None]:
        """Hold a multiprocessor for each thread block of a kernel that waits for another GPU: it runs when all its
        blocks do. `CudaMisuse` if others do not leave as many within ``wait_s``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._multiprocessors >= blocks, wait_s):
                raise CudaMisuse(f"kernels that wait leave {self._multiprocessors} multiprocessors to one of {blocks}")
            self._multiprocessors -= blocks
        try:
            yield
        finally:
            with self._changed:
                self._multiprocessors += blocks
                self._changed.notify_all()

    def use(self, index: int, what: str, *, same_device: bool = False, synchronises: bool = False) -> None:
        """Check a call on GPU ``index``: ``same_device`` wants it to be the current one, and a call that
        ``synchronises`` is not allowed while a graph is recorded."""
        self.calls.append(what)
        self._gpus.check()
        stream = current_stream()
        current = self._current if stream is None else stream.index
        if current is None or self._current is None:
            raise CudaMisuse(f"{what} before CUDA was initialised: a segmentation fault")
        if not 0 <= index < len(self._visible):
            raise CudaMisuse(
                f"{what} on GPU {index}, and this process sees {len(self._visible)}: invalid device ordinal"
            )
        if same_device and index != current:
            raise CudaMisuse(f"{what} on GPU {index} while GPU {current} is the current one: invalid handle")
        if synchronises and self._capturing:
            raise CudaMisuse(f"{what} while a graph is recorded: operation not permitted when stream is capturing")

    def is_available(self) -> bool:
        return bool(self._visible)

    def init(self, index: int) -> torch.device:
        if not 0 <= index < len(self._visible):
            raise CudaMisuse(f"GPU {index} of {len(self._visible)}: invalid device ordinal")
        self.calls.append("init")
        self._current = index
        return torch.device("cpu")

    def name(self, index: int) -> str:
        self.use(index, "the name is read")
        return "strict GPU"

    def uuid(self, index: int) -> str:
        self.use(index, "the UUID is read")
        return f"GPU-{self._visible[index]}"

    def memory(self, index: int) -> MemoryFigures:
        self.use(index, "memory is read")
        held = self._held(index)
        total = self._gpus.total_bytes
        return MemoryFigures(total, total - held, held, max(held, self._peaks.get(index, 0)))

    def reset_peak(self, index: int) -> None:
        self.use(index, "the peak is reset", synchronises=True)
        self._peaks[index] = self._held(index)

    def computed(self, index: int, num_bytes: int) -> None:
        """Play a computation that needs ``num_bytes`` besides what is held."""
        self._peaks[index] = max(self._peaks.get(index, 0), self._held(index) + num_bytes)

    def free_cached(self) -> None:
        self.calls.append("cached memory is freed")

    def zeros(self, num_bytes: int, index: int) -> torch.Tensor:
        self.use(index, "memory is allocated", synchronises=True)
        if num_bytes > self._gpus.total_bytes - self._held(index):
            raise torch.OutOfMemoryError(f"{num_bytes} bytes do not fit into {self._gpus.total_bytes}")
        data = self._mapped(bytearray(num_bytes), index, num_bytes)
        self.computed(index, 0)
        return data

    def share(self, data: torch.Tensor) -> list[Any]:
        allocated = self._allocated(data)
        index = allocated.index
        self.use(index, "memory is shared", synchronises=True)
        if "expandable_segments:True" in self._gpus.allocator_settings:
            raise CudaMisuse("memory of expandable segments is shared: pidfd_getfd is not permitted in containers")
        shared = _Shared(self, index, allocated.buffer)
        handle = self._gpus.add(shared)
        weakref.finalize(data.untyped_storage(), _freed, self._gpus, handle)
        return [index, handle]

    def open(self, handle: Sequence[Any], index: int | None = None) -> torch.Tensor:
        at = handle[0] if index is None else index
        self.init(at)
        self.use(at, "memory is opened")
        shared = self._gpus.shared.get(handle[1])
        if shared is None:
            raise RuntimeError("CUDA error: invalid resource handle")
        if shared.owner is self:
            raise CudaMisuse("a process opens its own memory: invalid device context")
        if shared.owner._visible[shared.index] != self._visible[at]:
            raise CudaMisuse("memory of another GPU is opened: invalid device ordinal")
        opened = self._mapped(shared.buffer, at, 0)
        shared.readers.append(weakref.ref(opened.untyped_storage()))
        return opened

    def record(self, index: int, *, timed: bool = False) -> StrictEvent:
        self.use(index, "an event is recorded", same_device=True)
        return StrictEvent(self, index, time.perf_counter() if timed else None)

    def to_host(self, tensors: Sequence[torch.Tensor], index: int) -> Callable[[], list[torch.Tensor]]:
        self.use(index, "results are copied to the host", same_device=True)
        return StrictHostCopy(self, tensors, index).wait

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.use(0, "memory is pinned", synchronises=True)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned_storages.append(memory.untyped_storage())
        return memory

    def to_device(self, source: torch.Tensor, target: torch.Tensor, index: int) -> Callable[[], None]:
        self.use(index, "memory of the host is copied to the GPU", same_device=True)
        if all(source.untyped_storage() is not pinned for pinned in self.pinned_storages):
            raise CudaMisuse("a copy from memory that is not pinned: the host waits for it")
        target.view(-1).view(torch.uint8).fill_(POISON)

        def wait() -> None:
            self.use(index, "a copy is waited for", same_device=True, synchronises=True)
            target.copy_(source)

        return wait

    def stream(self, index: int) -> StrictStream:
        self.use(index, "a stream is created", synchronises=True)
        if self._spare[index]:
            return cast(StrictStream, self._spare[index].pop())
        stream = StrictStream(index, self)
        self._streams.setdefault(index, []).append(stream)
        return stream

    def give_back(self, stream: Stream, index: int) -> None:
        assert isinstance(stream, StrictStream)
        if not stream.is_done(stream.length) or stream in self._spare[index]:
            raise CudaMisuse("a stream is given back that is in use")
        super().give_back(stream, index)

    def torch_stream(self, index: int) -> StrictStream:
        """What `torch.cuda.Stream` is, and the stream of a `ProcessGroupNCCL`: one of 32, which are given out in
        turn."""
        streams = self._torch_streams[index]
        if len(streams) == _TORCH_STREAMS:
            streams.append(streams.pop(0))
        else:
            streams.append(StrictStream(index, self))
        return streams[-1]

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        if not isinstance(stream, StrictStream) or stream not in self._streams.get(stream.index, []):
            raise CudaMisuse("a stream of another process is used: invalid resource handle")
        return stream.current()

    def synchronize(self, index: int) -> None:
        self.use(index, "the GPU is waited for", synchronises=True)
        for stream in self._streams.get(index, []):
            stream.synchronize()

    def record_graph(self, work: Callable[[], object], index: int, beside: Graph | None = None) -> StrictGraph:
        self.use(index, "a graph is recorded", same_device=True, synchronises=True)
        if beside is not None and not (
            isinstance(beside, StrictGraph) and (beside.cuda, beside.index) == (self, index)
        ):
            raise CudaMisuse("graphs of two GPUs share memory: invalid argument")
        work()
        self._capturing = True
        try:
            with _Recording():  # type: ignore[no-untyped-call]
                work()
        finally:
            self._capturing = False
        return StrictGraph(self, work, index)

    def _held(self, index: int) -> int:
        return sum(each.num_bytes for each in self._tensors.values() if each.index == index and each.storage())

    def _mapped(self, buffer: bytearray, index: int, num_bytes: int) -> torch.Tensor:
        """A tensor with a storage of its own over ``buffer``, which counts as ``num_bytes`` of GPU ``index``."""
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        self._tensors[id(data.untyped_storage())] = _Allocated(
            weakref.ref(data.untyped_storage()), buffer, index, num_bytes
        )
        return data

    def _allocated(self, data: torch.Tensor) -> _Allocated:
        found = self._tensors.get(id(data.untyped_storage()))
        if found is None or found.storage() is not data.untyped_storage():
            raise CudaMisuse("memory that is not on a GPU is shared")
        return found


def _freed(gpus: StrictGpus, handle: str) -> None:
    shared = gpus.shared.pop(handle)
    if any(reader() is not None for reader in shared.readers):
        gpus.misuses.append(f"{handle} was freed while another process had it open")
