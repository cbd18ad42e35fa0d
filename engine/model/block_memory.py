"""The bytes of a pool's blocks, for copies of them outside of the device."""

from __future__ import annotations

import torch

from engine.model.kv_pool import KVPool


class BlockMemory:
    """Copies blocks of a pool on a CPU or a GPU to and from the host. On a GPU each copy waits for the device."""

    def __init__(self, pool: KVPool) -> None:
        self._blocks = pool.tensor.view(pool.num_blocks, -1).view(torch.uint8)  # [num_blocks, layout.block_bytes]

    def read(self, block: int) -> bytes:
        """A copy of a block, after all steps launched so far."""
        return self._blocks[block].cpu().numpy().tobytes()

    def write(self, block: int, data: bytes) -> None:
        """Overwrite a block, before all steps launched from now on: the copy is complete when this returns."""
        self._blocks[block].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
