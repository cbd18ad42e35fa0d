"""Static batches of whole prompts, and a transport of its own choice, serve the same tokens as the defaults do."""

from __future__ import annotations

from pathlib import Path

from pdserve import Client
from tests.local_cluster import local_cluster
from tests.random_models import greedy_tokens, save_random_model


def test_same_tokens_however_it_is_scheduled_and_sent(tmp_path: Path) -> None:
    model = save_random_model(tmp_path, "gqa")
    engine = {"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 3}
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {**engine, "batching": "static", "chunk_tokens": "off"},
        "transfer": {"transport": "torch_dist", "overlap": "chunk"},
    }
    prompts = [[(31 * i + 7 * length) % 307 for i in range(length)] for length in (150, 5, 70, 64)]
    expected = [tuple(greedy_tokens(model, prompt, 6)) for prompt in prompts]
    with local_cluster(settings) as cluster:
        with Client(cluster.target) as client:
            for mode in ("pd", "colocated"):
                streams = [client.generate(p, max_tokens=6, ignore_eos=True, mode=mode, salt=mode) for p in prompts]
                results = [stream.result() for stream in streams]
                assert [result.token_ids for result in results] == expected
                for result in results:
                    assert result.kv_bytes == result.kv_bytes_expected
                    assert mode == "colocated" or (result.kv_bytes > 0 and result.transport == "torch_dist")
        cluster.wait_idle()
