"""The KV pool of one end of hand-offs: blocks of a layout in a `Memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from pdserve.core.kv_layout import KVLayout, Region, probe_area

if TYPE_CHECKING:
    from runtime.cuda import Cuda  # imports torch


class Pool:
    """``num_blocks`` blocks at the beginning of ``memory``, followed by the `probe_area`. ValueError if the memory is
    too small."""

    def __init__(self, layout: KVLayout, num_blocks: int, memory: Memory) -> None:
        self.layout, self.num_blocks, self.memory = layout, num_blocks, memory
        offset = probe_area(layout.block_bytes * num_blocks).offset
        self._probe_area = Region(offset, memory.size - offset)
        if self._probe_area.size <= 0:
            raise ValueError(f"{num_blocks} blocks do not fit into {memory.size} bytes")
        self._next_probe = 0

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, device: str = "cpu", probe_bytes: int | None = None) -> Pool:
        """Allocate a pool of zeros without an engine, to measure and test. Its probe area has ``probe_bytes`` (default:
        as in an engine's pool). torch's OutOfMemoryError if a GPU has no room."""
        offset, size = probe_area(layout.block_bytes * num_blocks)
        size = offset + (probe_bytes or size)
        memory: Memory = HostMemory.create(size) if device == "cpu" else DeviceMemory.create(size, device)
        return cls(layout, num_blocks, memory)

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        num_blocks: int,
        handle: Mapping[str, Any],
        memory_fd: int,
        memory: DeviceMemory | None = None,
        cuda: Cuda | None = None,
    ) -> Pool:
        """Open an engine's pool. ``handle`` comes from `contract.engine.Ready`; ``memory_fd`` is the memory file of a
        pool on the host, and the caller closes it. ``memory`` is what this process gave to the engine for a pool on a
        GPU, if it did; else ``cuda`` opens the engine's (default: torch). TransferRefused if the memory cannot be
        opened, ValueError if its size does not match the layout."""
        expected = layout.block_bytes * num_blocks
        if handle["bytes"] != expected:
            raise ValueError(f"the pool has {handle['bytes']} bytes, its layout needs {expected}")
        if handle["kind"] == "memfd":
            return cls(layout, num_blocks, HostMemory(memory_fd))
        if memory is not None and memory.handle == list(handle["share"]):
            return cls(layout, num_blocks, memory.again())
        return cls(layout, num_blocks, DeviceMemory.open(handle["share"], cuda=cuda))

    def regions(self, block_ids: Sequence[int], layers: range | None = None) -> list[Region]:
        """The regions of blocks: see `KVLayout.regions`."""
        return self.layout.regions(block_ids, self.num_blocks, layers)

    @property
    def probe_bytes(self) -> int:
        """The size of the probe area, at least `MAX_PROBE_BYTES`."""
        return self._probe_area.size

    def probe(self, start: int, size: int) -> list[Region]:
        """``size`` bytes of the probe area, from ``start`` on. ValueError if they exceed it."""
        offset, whole = self._probe_area
        if not 0 <= start <= start + size <= whole:
            raise ValueError(f"bytes {start} to {start + size} of {whole}")
        return [Region(offset + start, size)] if size else []

    def next_probe(self, size: int) -> list[Region]:
        """The next ``size`` bytes of the probe area. Its parts are handed out in turn, to all links."""
        start = self._next_probe if self._next_probe + size <= self.probe_bytes else 0
        self._next_probe = start + size
        return self.probe(start, size)

    def close(self) -> None:
        """Close the memory. Views of it stay valid until they are dropped. May be called twice."""
        self.memory.close()
