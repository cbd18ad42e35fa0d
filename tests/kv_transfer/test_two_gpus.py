"""KV between two GPUs over NCCL. Skipped with the reason where there are fewer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from kv_transfer.pool import Pool
from kv_transfer.transports.torch_dist import TorchDistTransport
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout
from tests.loopback import SECRET

MakeEnds = Callable[..., Awaitable[Any]]
LAYOUT = KVLayout.uniform("model", "bfloat16", block_size=64, num_layers=32, num_kv_heads=8, head_dim=128)  # 8 MiB
NUM_BLOCKS = 64

pytestmark = [
    pytest.mark.cuda2,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"torch sees {torch.cuda.device_count()} GPUs, NCCL needs two; test_nccl.py checks its calls",
    ),
]


class GpuPool(Pool):
    """A pool on a GPU whose bytes are random."""

    def __init__(self, device: str) -> None:
        pool = Pool.create(LAYOUT, NUM_BLOCKS, device, MAX_PROBE_AREA_BYTES)
        super().__init__(LAYOUT, NUM_BLOCKS, pool.memory)
        self.data = memoryview(bytearray())  # what `make_ends` fills
        for region in self.regions(range(NUM_BLOCKS)):
            view = self.memory.view(region)
            assert isinstance(view, torch.Tensor)
            view.random_(0, 256)

    def tensor(self, block_ids: list[int]) -> torch.Tensor:
        """The bytes of blocks, on the host."""
        views = [self.memory.view(region) for region in self.regions(block_ids)]
        return torch.cat([view.cpu() for view in views if isinstance(view, torch.Tensor)])


def transport(pool: Pool) -> TorchDistTransport:
    """NCCL on the pool's GPU."""
    return TorchDistTransport(pool.memory, SECRET, backend="nccl", timeout_s=20.0)


async def test_blocks_travel_and_the_link_is_rated_by_more_than_its_first_payload(make_ends: MakeEnds) -> None:
    source, target = GpuPool("cuda:0"), GpuPool("cuda:1")
    ends = await make_ends(source=source, target=target, sending=transport(source), receiving=transport(target))
    ends.start("r", list(range(32)), for_s=120.0, send=list(range(32, 64)))
    received = await ends.both("r")
    assert torch.equal(target.tensor(list(range(32))), source.tensor(list(range(32, 64))))
    assert received.proof.kv_bytes == 32 * LAYOUT.block_bytes
    assert ends.sender.links()[0].ceiling_gbs > 0.1
