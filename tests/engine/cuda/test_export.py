"""The pool of a GPU as another process sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from engine.model.kv_pool import KVPool
from pdserve.core.kv_layout import KVLayout
from runtime.cuda import Cuda

LAYOUT = KVLayout.uniform("m", "bfloat16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=64)
BLOCKS = 10
PEER = """
import asyncio, json, sys
import msgspec
from kv_transfer.fetch import Fetch, staged
from kv_transfer.pool import Pool
from pdserve.core.kv_layout import KVLayout

layout, blocks, handle = json.loads(sys.argv[1])
handle["share"] = [bytes.fromhex(v[1:]) if isinstance(v, str) else v for v in handle["share"]]
pool = Pool.open(msgspec.convert(layout, KVLayout), blocks, handle, -1)

async def move(fetch):
    if on_device:
        fetch.write_on_device(pool.memory.view, source)
    else:
        fetch.write(payload.parts[0])

async def copy(into):
    fetch = Fetch(pool.memory, into, move, on_device=on_device)
    await fetch
    await fetch.commit()

on_device, source = False, pool.regions([3, 4, 8])
payload = asyncio.run(staged(pool.memory, source))
asyncio.run(copy(pool.regions([1, 6, 7])))
on_device, source = True, pool.regions([5, 0], range(1, 3))
asyncio.run(copy(pool.regions([2, 9], range(1, 3))))
pool.close()
"""


def test_blocks_are_read_and_written_by_another_process(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("memory of CPUs is shared another way")
    pool = KVPool.on_cuda(LAYOUT, BLOCKS, Cuda(), 0)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    torch.cuda.synchronize()
    share = [f"x{v.hex()}" if isinstance(v, bytes) else v for v in pool.handle["share"]]
    told = json.dumps([msgspec.to_builtins(LAYOUT), BLOCKS, pool.handle | {"share": share}])
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", PEER, told], cwd=root, check=True, timeout=100)
    assert torch.equal(pool.tensor[[1, 6, 7]], pool.tensor[[3, 4, 8]])
    assert torch.equal(pool.tensor[[2, 9], 1:3], pool.tensor[[5, 0], 1:3])
