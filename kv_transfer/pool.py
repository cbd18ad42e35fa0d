"""A KV pool as the two ends of a hand-off see it: blocks of a layout in a `Memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from pdserve.core.kv_layout import KVLayout, Region, probe_area


class Pool:
    """``num_blocks`` blocks at the beginning of ``memory``; the `probe_area` lies behind them. ValueError if the memory
    is too small."""

    def __init__(self, layout: KVLayout, num_blocks: int, memory: Memory) -> None:
        self.layout, self.num_blocks, self.memory = layout, num_blocks, memory
        offset = probe_area(layout.block_bytes * num_blocks).offset
        self._probe_area = Region(offset, memory.size - offset)
        if self._probe_area.size <= 0:
            raise ValueError(f"{num_blocks} blocks do not fit into {memory.size} bytes")

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, device: str = "cpu", probe_bytes: int | None = None) -> Pool:
        """A pool of zeros without an engine, for measuring and testing; its probe area has ``probe_bytes`` (default:
        as engines have it). torch's OutOfMemoryError if a GPU has no room for it."""
        offset, size = probe_area(layout.block_bytes * num_blocks)
        size = offset + (probe_bytes or size)
        memory: Memory = HostMemory.create(size) if device == "cpu" else DeviceMemory.create(size, device)
        return cls(layout, num_blocks, memory)

    @classmethod
    def open(cls, layout: KVLayout, num_blocks: int, handle: Mapping[str, Any], memory_fd: int) -> Pool:
        """An engine's pool, which ``handle`` (of `engine.messages.Ready`) describes; ``memory_fd`` is its memory file
        if it is on the host, and stays the caller's. TransferRefused if it cannot be opened, ValueError if its size is
        not its layout's."""
        expected = layout.block_bytes * num_blocks
        if handle["bytes"] != expected:
            raise ValueError(f"the pool has {handle['bytes']} bytes, its layout needs {expected}")
        memory: Memory = HostMemory(memory_fd) if handle["kind"] == "memfd" else DeviceMemory.open(handle["share"])
        return cls(layout, num_blocks, memory)

    def regions(
        self, block_ids: Sequence[int], layers: range | None = None, share: KVLayout | None = None
    ) -> list[Region]:
        """Where these blocks lie: see `KVLayout.regions`."""
        return self.layout.regions(block_ids, self.num_blocks, layers, share)

    @property
    def probe_bytes(self) -> int:
        """The size of the probe area, `MAX_PROBE_BYTES` at least."""
        return self._probe_area.size

    def probe(self, start: int, size: int) -> list[Region]:
        """``size`` bytes of the probe area, from ``start`` on. ValueError beyond it."""
        offset, whole = self._probe_area
        if not 0 <= start <= start + size <= whole:
            raise ValueError(f"bytes {start} to {start + size} of {whole}")
        return [Region(offset + start, size)] if size else []

    def close(self) -> None:
        """Let go of the memory; views handed out stay valid until they are dropped. Closing twice is fine."""
        self.memory.close()
