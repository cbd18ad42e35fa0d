"""A worker process's view of its engine's KV pool, as bytes. It satisfies `kv_transfer.base.BlockStore`.

On CPUs both processes map the same anonymous memory file, and nothing here imports torch. On CUDA the pool is opened by
its IPC handle and staged through pinned memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.core.kv_layout import KVLayout, blank_memory

if TYPE_CHECKING:
    import torch

Stretch = Any
"""A memoryview of bytes on the host, or a tensor of uint8 with one dimension on a device."""


class MappedPool:
    """The pool of ``num_blocks`` blocks that ``handle`` (of `engine.messages.Ready`) describes.

    ``memory_fd`` is the pool's memory file (CPU only); it is not closed here.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, handle: Mapping[str, Any], memory_fd: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        expected = layout.block_bytes * num_blocks
        self._blank = blank_memory(expected)
        if handle["bytes"] != expected:
            raise ValueError(f"the pool has {handle['bytes']} bytes, its layout needs {expected}")
        self._memory: _HostMemory | _CudaMemory
        if handle["kind"] == "memfd":
            self._memory = _HostMemory(memory_fd, expected)
        else:
            self._memory = _CudaMemory(handle, expected)

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def file(self) -> tuple[int, memoryview] | None:
        """The descriptor of the pool's memory file and the mapping of all of it; None for a pool on a device."""
        return self._memory.file if isinstance(self._memory, _HostMemory) else None

    @property
    def on_device(self) -> tuple[Sequence[Any], torch.Tensor] | None:
        """How other processes open a pool on a device (what `torch.UntypedStorage._new_shared_cuda` takes), and all of
        its bytes here; None for one on the host."""
        return None if isinstance(self._memory, _HostMemory) else (self._memory.share, self._memory.bytes)

    def read_blocks(
        self, block_ids: Sequence[int], layers: range | None = None, *, on_device: bool = False
    ) -> list[Stretch]:
        """The bytes of whole blocks (or of ``layers`` of them), in order; what touches is one buffer. On CPUs these are
        views of the pool itself; on CUDA too if ``on_device``, else staged copies. ValueError for blocks or layers that
        are not there."""
        return self._memory.read(self._runs(block_ids, layers), on_device)

    def land(self, block_ids: Sequence[int], layers: range | None = None, *, on_device: bool = False) -> Landing:
        """Room for these blocks (or ``layers`` of them): memory to be filled in order, and then committed. ValueError
        as above."""
        return self._memory.land(self._runs(block_ids, layers), on_device)

    def scratch(self, size: int, *, on_device: bool = False) -> memoryview | torch.Tensor:
        """Memory outside the pool."""
        return self._memory.scratch(size, on_device)

    @property
    def blank_bytes(self) -> int:
        """How many zeros lie behind the pool."""
        return self._blank[1]

    def blank(self, start: int, size: int, *, on_device: bool = False) -> Stretch:
        """``size`` of the zeros behind the pool, from ``start`` on, which hold nothing and never will; on the host
        unless ``on_device``. ValueError beyond them."""
        offset, whole = self._blank
        if not 0 <= start <= start + size <= whole:
            raise ValueError(f"bytes {start} to {start + size} of {whole}")
        return self._memory.blank(offset + start, size, on_device)

    def _runs(self, block_ids: Sequence[int], layers: range | None) -> list[tuple[int, int]]:
        return self._layout.byte_runs(
            block_ids, self._layout.all_layers if layers is None else layers, self._num_blocks
        )

    def close(self) -> None:
        """Let go of the mapping; views handed out stay valid until they are dropped. Closing twice is fine."""
        self._memory.close()


class PoolLanding(NamedTuple):
    """The blocks themselves, and what to wait for until what was put there is there."""

    parts: list[Stretch]
    wait: Callable[[], None]

    def commit(self) -> None:
        """Wait for it."""
        self.wait()


class _HostMemory:
    def __init__(self, fd: int, size: int) -> None:
        self._fd = os.dup(fd)
        whole = sum(blank_memory(size))
        # With its page table filled: else the first hand-off into each block would pay for that.
        self._map: mmap.mmap | None = mmap.mmap(fd, whole, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(self._map)

    @property
    def file(self) -> tuple[int, memoryview]:
        return self._fd, self._view

    def read(self, runs: list[tuple[int, int]], on_device: bool) -> list[Stretch]:
        return [*self._views(runs, on_device)]

    def land(self, runs: list[tuple[int, int]], on_device: bool) -> PoolLanding:
        return PoolLanding(self._views(runs, on_device), lambda: None)

    def scratch(self, size: int, on_device: bool) -> memoryview:
        assert not on_device, "the pool is on the host"
        return memoryview(bytearray(size))

    def blank(self, offset: int, size: int, on_device: bool) -> memoryview:
        return self._views([(offset, size)], on_device)[0]

    def _views(self, runs: list[tuple[int, int]], on_device: bool) -> list[memoryview]:
        assert not on_device, "the pool is on the host"
        return [self._view[offset : offset + size] for offset, size in runs]

    def close(self) -> None:
        self._view.release()
        if self._map is not None:
            os.close(self._fd)
            with contextlib.suppress(BufferError):  # somebody still reads a view; it goes when the view does
                self._map.close()
            self._map = None


class CudaLanding:
    """Pinned memory, from which `commit` brings the blocks to the device."""

    def __init__(self, memory: _CudaMemory, runs: list[tuple[int, int]]) -> None:
        self._memory, self._runs = memory, runs
        self._staged = memory.staging(sum(size for _, size in runs))

    @property
    def parts(self) -> list[memoryview]:
        """One, for all of them."""
        return [self._staged.numpy().data]

    def commit(self) -> None:
        """Copy; returns when the blocks are in the pool."""
        self._memory.copy(self._runs, self._staged, to_pool=True)


class _CudaMemory:
    """This process computes nothing, so its default stream is for transfers alone. What goes by the host is staged in
    pinned memory."""

    def __init__(self, handle: Mapping[str, Any], size: int) -> None:
        import torch

        self._torch = torch
        whole = sum(blank_memory(size))
        self.share: Sequence[Any] = handle["share"]
        storage = torch.UntypedStorage._new_shared_cuda(*self.share)
        self._device = torch.device("cuda", self.share[0])
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)[:whole]

    @property
    def bytes(self) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError("the pool is closed")
        return self._bytes

    def read(self, runs: list[tuple[int, int]], on_device: bool) -> list[Stretch]:
        if on_device:
            return [*self._views(runs)]
        staged = self.staging(sum(size for _, size in runs))
        self.copy(runs, staged, to_pool=False)
        return [staged.numpy().data]

    def land(self, runs: list[tuple[int, int]], on_device: bool) -> PoolLanding | CudaLanding:
        return PoolLanding(self._views(runs), self.synchronize) if on_device else CudaLanding(self, runs)

    def scratch(self, size: int, on_device: bool) -> memoryview | torch.Tensor:
        if on_device:
            return self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        return memoryview(bytearray(size))

    def blank(self, offset: int, size: int, on_device: bool) -> memoryview | torch.Tensor:
        # On the host they are no copy in staging memory: what was staged there before was KV.
        return self._views([(offset, size)])[0] if on_device else memoryview(bytearray(size))

    def staging(self, size: int) -> torch.Tensor:
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def copy(self, runs: list[tuple[int, int]], staged: torch.Tensor, *, to_pool: bool) -> None:
        """Between the pool's ``runs`` and ``staged``, which holds them one after the other."""
        start = 0
        for ours in self._views(runs):
            theirs = staged[start : start + ours.nbytes]
            target, source = (ours, theirs) if to_pool else (theirs, ours)
            target.copy_(source, non_blocking=True)
            start += ours.nbytes
        self.synchronize()

    def synchronize(self) -> None:
        self._torch.cuda.current_stream(self._device).synchronize()

    def _views(self, runs: list[tuple[int, int]]) -> list[torch.Tensor]:
        return [self.bytes[offset : offset + size] for offset, size in runs]

    def close(self) -> None:
        self._bytes = None


Landing = PoolLanding | CudaLanding
"""What `MappedPool.land` gives."""
