"""A program for the virtual environment of a real vLLM, which needs no GPU: `python gpu_cache_of_vllm.py CONNECTOR`,
the path of pdserve's connector. Has vLLM place the KV cache of a GPU, here in memory of the host, and give blocks to
requests, and has the connector share that cache. Prints what the connector tells the worker, as JSON."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

BLOCK_SIZE, HEADS, HEAD_DIM, LAYERS, MEMORY = 16, 4, 32, 3, 2**22
PROBE_BYTES = 150_000


class Told:
    """In the worker's place."""

    def __init__(self) -> None:
        self.messages: list[tuple[object, ...]] = []

    def tell(self, *message: object) -> None:
        self.messages.append(message)

    def follow(self) -> None:
        pass


def _share(storage: torch.UntypedStorage) -> tuple[int, int]:
    return 0, storage.nbytes()


def main(path: str) -> None:
    sys.path.insert(0, str(Path(path).parent))
    module: Any = importlib.import_module(Path(path).stem)
    config = VllmConfig()
    layout = module.PdserveConnector.get_required_kvcache_layout(
        SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    )
    config.cache_config.kv_cache_layout = layout
    config.cache_config.block_size = BLOCK_SIZE
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float16)
    caches_config = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(names, spec)], MEMORY)
    caches = allocate_kv_cache(caches_config, torch.device("cpu"), KVCacheLayout[layout], [BLOCK_SIZE])

    connector = module.PdserveConnector.__new__(module.PdserveConnector)
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    connector._layers = dict.fromkeys(names, layer)
    connector._groups, connector._ranks, connector._block_size, connector._worker = 0, 1, BLOCK_SIZE, Told()
    extra = {"probe_bytes": PROBE_BYTES}
    connector._kv_transfer_config = SimpleNamespace(get_from_extra_config=lambda key, default: extra.get(key, default))
    connector._num_spare = connector._spare_blocks(caches_config)
    torch.UntypedStorage._share_cuda_ = _share  # type: ignore[assignment,method-assign]
    module._GpuProgress = lambda worker, device: worker
    connector.register_kv_caches(caches)

    blocks = BlockPool(caches_config.num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)
    before = blocks.get_num_free_blocks()
    connector.bind_gpu_block_pool(blocks)
    free = blocks.get_num_free_blocks()
    given = [block.block_id for block in blocks.get_new_blocks(free)]
    print(json.dumps({"told": connector._worker.messages, "before": before, "free": free, "last": max(given)}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
