"""A small pool of the model's own layout, where the worker's would lie: in a memory file, or on its GPU."""

from __future__ import annotations

from kv_transfer.pool import Pool
from pdserve.core.errors import LaunchError
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout

_NUM_BLOCKS = 2  # nothing is handed over to a probe


def probe_pool(layout: KVLayout, device: str) -> Pool:
    """A pool on ``device`` (``cpu``, ``cuda:0`` ...). `LaunchError` if that cannot hold it."""
    if device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise LaunchError("torch sees no GPU here")
        try:
            return Pool.create(layout, _NUM_BLOCKS, device, MAX_PROBE_AREA_BYTES)
        except torch.OutOfMemoryError:
            need_mb = (_NUM_BLOCKS * layout.block_bytes + MAX_PROBE_AREA_BYTES) / 2**20
            raise LaunchError(f"{device} has no {need_mb:.0f} MiB free") from None
    return Pool.create(layout, _NUM_BLOCKS, device, MAX_PROBE_AREA_BYTES)
