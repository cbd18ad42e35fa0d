"""Disaggregated tokens == colocated tokens == transformers' greedy tokens; bytes moved == bytes predicted."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.core.timeline import UNATTRIBUTED
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster, undisturbed
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
TOKENS = 12
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 230)  # the last are several chunks of 64


@pytest.fixture(scope="module", params=list(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    engine = {"block_size": BLOCK, "num_blocks": 64, "max_num_batched_tokens": 64}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as started:
        yield started


def test_same_tokens_whichever_way(model: Path, cluster: LocalCluster) -> None:
    draw = random.Random(7)
    with Client(cluster.target) as client:
        for length in LENGTHS:
            prompt = [draw.randrange(307) for _ in range(length)]
            apart = client.generate(prompt, max_tokens=TOKENS, mode="pd").result()
            together = client.generate(prompt, max_tokens=TOKENS, mode="colocated").result()
            assert apart.token_ids == together.token_ids == tuple(greedy_tokens(model, prompt, TOKENS)), length
            assert (apart.mode, together.mode) == ("pd", "colocated")
            assert apart.prefill_worker == "prefill-0"
            assert apart.decode_worker == "decode-0"
            shape = SHAPES[model.name]
            head_dim = shape.get("head_dim", 64 // shape["num_attention_heads"])
            layout_bytes = 2 * 3 * shape["num_key_value_heads"] * head_dim * 4
            assert apart.kv_bytes == apart.kv_bytes_expected == -(-length // BLOCK) * BLOCK * layout_bytes
            assert together.kv_bytes == together.kv_bytes_expected == 0
    assert leaked_blocks(cluster.wait_idle()) == 0


def test_stages_sum_to_what_the_client_saw(cluster: LocalCluster) -> None:
    def check(result: Generation) -> None:
        for breakdown in result.breakdowns.values():
            assert abs(breakdown.stages_ms[UNATTRIBUTED]) <= max(2.0, 0.05 * breakdown.total_ms), breakdown

    with Client(cluster.target) as client:
        for mode in ("pd", "colocated"):
            asked = functools.partial(client.generate, [5] * 40, max_tokens=4, mode=mode)
            result = undisturbed(lambda asked=asked: asked().result(), check)  # type: ignore[misc]
            for breakdown in result.breakdowns.values():
                assert sum(breakdown.stages_ms.values()) == pytest.approx(breakdown.total_ms)


def test_one_token_needs_no_hand_off(model: Path, cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        result = client.generate([3] * 20, max_tokens=1, mode="pd").result()
    assert result.token_ids == tuple(greedy_tokens(model, [3] * 20, 1))
    assert (result.kv_bytes, result.kv_bytes_expected, result.ttft_decode_ms) == (0, 0, None)


def test_seeded_draws_do_not_depend_on_the_way(cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        draws = {
            client.generate([9] * 30, max_tokens=10, temperature=1.0, top_p=0.9, seed=seed, mode=mode)
            .result()
            .token_ids
            for mode in ("pd", "colocated")
            for seed in (11, 11)
        }
        other = client.generate([9] * 30, max_tokens=10, temperature=1.0, top_p=0.9, seed=12).result().token_ids
    assert len(draws) == 1
    assert other not in draws
