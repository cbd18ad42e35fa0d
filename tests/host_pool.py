"""A pool without an engine whose bytes tests can look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kv_transfer.fetch import Payload
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
from pdserve.core.kv_layout import CacheSpec, KVLayout, Region, probe_area


class HostPool(Pool):
    """``data`` are its blocks, ``host`` the memory file it lies in."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.host = HostMemory.create(sum(probe_area(layout.block_bytes * num_blocks)))
        super().__init__(layout, num_blocks, self.host)
        self.data = self.host.view(Region(0, layout.block_bytes * num_blocks))

    def views(self, block_ids: Sequence[int], layers: range | None = None) -> list[memoryview]:
        """The bytes of blocks, or of layers of them."""
        return [self.host.view(region) for region in self.regions(block_ids, layers)]

    def bytes_of(self, block_ids: Sequence[int]) -> bytes:
        """The same as one."""
        return b"".join(self.views(block_ids))

    def payload(self, regions: Sequence[Region]) -> Payload:
        """Regions, to be sent."""
        return Payload(self.host, regions)


def inline(*parts: bytes | bytearray | memoryview) -> Payload:
    """Bytes that lie in no pool, to be sent."""
    return Payload(None, (), [memoryview(part).cast("B") for part in parts if len(part)])


def changed(layout: KVLayout, **fields: Any) -> KVLayout:
    """A layout with one kind of cache, with other fields of its own or of its cache."""
    (cache,) = layout.caches
    of_cache = {name: value for name, value in fields.items() if name in CacheSpec.__struct_fields__}
    of_layout = {name: value for name, value in fields.items() if name not in of_cache}
    return replace(layout, caches=(replace(cache, **of_cache),), **of_layout)
