"""The pool of a GPU as another process sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict

from engine.model.kv_pool import KVPool
from pdserve.core.kv_layout import KVLayout

LAYOUT = KVLayout("m", "bfloat16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=64)
BLOCKS = 10
PEER = """
import json, sys
from pdserve.core.kv_layout import KVLayout
from engine.process.mapped_pool import MappedPool
layout, blocks, handle = json.loads(sys.argv[1])
handle["share"] = [bytes.fromhex(v[1:]) if isinstance(v, str) else v for v in handle["share"]]
pool = MappedPool(KVLayout(**layout), blocks, handle, -1)
data = b"".join(pool.read_blocks([3, 4, 8]))
landing = pool.land([1, 6, 7])
(part,) = landing.parts
part[:] = data
landing.commit()
landing = pool.land([2, 9], range(1, 3), on_device=True)
for part, source in zip(landing.parts, pool.read_blocks([5, 0], range(1, 3), on_device=True)):
    part.copy_(source)
landing.commit()
pool.close()
"""


def test_blocks_are_read_and_written_by_another_process(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("memory of CPUs is shared another way")
    pool = KVPool.on_cuda(LAYOUT, BLOCKS, torch.device("cuda", 0))
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    torch.cuda.synchronize()
    share = [f"x{v.hex()}" if isinstance(v, bytes) else v for v in pool.handle["share"]]
    told = json.dumps([asdict(LAYOUT), BLOCKS, pool.handle | {"share": share}])
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", PEER, told], cwd=root, check=True, timeout=100)
    assert torch.equal(pool.tensor[[1, 6, 7]], pool.tensor[[3, 4, 8]])
    assert torch.equal(pool.tensor[[2, 9], 1:3], pool.tensor[[5, 0], 1:3])
