"""The other process of tests of torch_dist and of peers that are not proven: receives hand-offs."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import msgspec

from kv_transfer.pool import Pool
from pdserve.core.clock import MonotonicClock
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import MAX_PROBE_AREA_BYTES, KVLayout
from tests.kv_transfer.conftest import receiver_of
from tests.loopback import create_transport

LARGE = KVLayout.uniform("model", "bfloat16", block_size=64, num_layers=30, num_kv_heads=3, head_dim=64)
"""Blocks of 1.5 MB."""


def say(**values: object) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def receive_many(name: str, blocks: int, device: str = "cpu") -> None:
    """Receive one hand-off of all blocks per line of the input, and say its proof."""
    pool, clock = Pool.create(LARGE, blocks, device, MAX_PROBE_AREA_BYTES), MonotonicClock()
    receiver = receiver_of(pool, create_transport(name, pool.memory), epoch="e", clock=clock, lease_s=10.0)
    say(**asdict(KVPeer("d", "e", await receiver.start("127.0.0.1"))))
    while attempt_id := (await asyncio.to_thread(sys.stdin.readline)).strip():
        transfer = receiver.announce(attempt_id, "p", range(blocks), 0, clock.now() + 60)
        say(**msgspec.structs.asdict((await transfer.wait()).proof))


if __name__ == "__main__":
    asyncio.run(receive_many(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
