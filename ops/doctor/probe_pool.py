"""A small pool with the model's KV layout for a probe, where the worker's pool would be: in a memory file, or on its
GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_transfer.base import BlockStore, KVTransport, Landing
from kv_transfer.device_memory import DeviceMemory
from kv_transfer.factory import create_transport
from kv_transfer.memory_store import MemoryStore
from kv_transfer.shared_memory import SharedMemory
from kv_transfer.sink import Stretch
from pdserve.core.errors import LaunchError
from pdserve.core.kv_layout import MAX_BLANK_BYTES, KVLayout, blank_memory

if TYPE_CHECKING:
    import torch

_NUM_BLOCKS = 2  # no blocks are received
_TIMEOUT_S = 10.0


class ProbePool:
    """``store`` is the pool; ``device`` is ``cpu`` or ``cuda:N``. `LaunchError` if the device cannot hold it."""

    def __init__(self, layout: KVLayout, device: str) -> None:
        self._device = device
        self._memory: SharedMemory | None = None
        self._device_memory: DeviceMemory | None = None
        self.store: BlockStore
        if device == "cpu":
            host = MemoryStore(layout, _NUM_BLOCKS, MAX_BLANK_BYTES)
            self.store, self._memory = host, host.memory
        else:
            gpu = _GpuStore(layout, _NUM_BLOCKS, device)
            self.store, self._device_memory = gpu, gpu.memory

    def transport(self, name: str) -> KVTransport:
        """One of `offered_transports`, over this pool."""
        return create_transport(
            name, device=self._device, timeout_s=_TIMEOUT_S, memory=self._memory, device_memory=self._device_memory
        )


class _GpuStore:
    """Blocks on a GPU that are never written, and the zeros that probes send."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise LaunchError("torch sees no GPU here")
        self._torch, self._layout, self._num_blocks = torch, layout, num_blocks
        self._offset, _ = blank_memory(layout.block_bytes * num_blocks)
        self.blank_bytes = MAX_BLANK_BYTES
        try:
            self._bytes = torch.zeros(self._offset + self.blank_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise LaunchError(f"{device} has no {(self._offset + self.blank_bytes) / 2**20:.0f} MiB free") from None
        share = self._bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self.memory = DeviceMemory(share, self._bytes)

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    def read_blocks(self, block_ids: Sequence[int], layers: range, *, on_device: bool) -> list[Stretch]:
        """Views on the device, or copies on the host."""
        runs = self._layout.byte_runs(block_ids, layers, self._num_blocks)
        parts: list[torch.Tensor] = [self._bytes[offset : offset + size] for offset, size in runs]
        return [*parts] if on_device else [part.cpu().numpy().data for part in parts]

    def land(self, block_ids: Sequence[int], layers: range, *, on_device: bool) -> Landing:
        """Not supported: probes receive no blocks."""
        raise NotImplementedError("a probe's pool takes no blocks")

    def blank(self, start: int, size: int, *, on_device: bool) -> Stretch:
        """Zeros behind the blocks."""
        if on_device:
            return self._bytes[self._offset + start : self._offset + start + size]
        return memoryview(bytearray(size))

    def scratch(self, size: int, *, on_device: bool) -> Stretch:
        """Memory outside the pool."""
        if on_device:
            return self._torch.empty(size, dtype=self._torch.uint8, device=self._bytes.device)
        return memoryview(bytearray(size))
