"""Static batches and whole prompts serve the same tokens as the defaults do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pdserve import Client
from tests.local_cluster import leaked_blocks, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model


@pytest.mark.parametrize("options", [{"batching": "static", "chunk_tokens": "off"}, {"chunk_tokens": 24}])
def test_same_tokens_however_it_is_scheduled(tmp_path: Path, options: dict[str, str | int]) -> None:
    model = save_random_model(tmp_path, next(iter(SHAPES)))
    engine = {"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 3, **options}
    draw = random.Random(11)
    prompts = [[draw.randrange(307) for _ in range(length)] for length in (150, 5, 70, 33, 100, 64)]
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as cluster:
        with Client(cluster.target) as client:
            for mode in ("pd", "colocated"):
                streams = [client.generate(p, max_tokens=6, ignore_eos=True, mode=mode) for p in prompts]
                for prompt, stream in zip(prompts, streams, strict=True):
                    result = stream.result()
                    assert result.token_ids == tuple(greedy_tokens(model, prompt, 6))
                    assert result.kv_bytes == result.kv_bytes_expected
        assert leaked_blocks(cluster.wait_idle()) == 0
