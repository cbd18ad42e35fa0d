"""KV of a prompt's beginning comes from the cache of another worker, and the answer is the same. (`pdserve simulate`:
what follows if the other worker no longer has it, is killed or stopped.)"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from pdserve import Client, Generation
from pdserve.core.timeline import Figure
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
TOKENS = 20
WORKERS = ("prefill-0", "prefill-1", "decode-0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), next(iter(SHAPES)))


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": BLOCK, "num_blocks": 80, "max_num_batched_tokens": 64},
        "router": {"policy": "session", "prefix_fetch": "always", "heartbeat_s": 0.1},
    }
    with local_cluster(settings, prefill=2) as started:
        yield started


def session_on(worker_id: str, among: tuple[str, ...] = WORKERS[:2]) -> str:
    """A session that policy ``session`` gives to this worker."""

    def chosen(session: str) -> str:
        return max(among, key=lambda each: xxhash.xxh3_64_intdigest(f"{each}/{session}".encode()))

    return next(f"s{number}" for number in range(1000) if chosen(f"s{number}") == worker_id)


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(307) for _ in range(length)]


def check_moved(generation: Generation, source: str, tokens: int, block_bytes: int) -> None:
    """So many tokens came from ``source``, and as many bytes as they have."""
    fetch = generation.prefix_fetch
    assert fetch is not None, generation.placements
    assert (fetch.source, fetch.tokens, fetch.tokens_wanted, fetch.failure) == (source, tokens, tokens, "")
    assert fetch.kv_bytes == fetch.kv_bytes_expected == tokens // BLOCK * block_bytes
    assert f"{tokens} tokens from {source} are fetched" in generation.placements[-1]


def test_a_conversation_moves_between_workers(model: Path, cluster: LocalCluster) -> None:
    prompt = prompt_of(10 * BLOCK + 3, seed=1)
    mine, other = session_on("prefill-0"), session_on("prefill-1")
    with Client(cluster.target) as client:
        first = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=mine).result()
        assert (first.prefill_worker, first.prefix_fetch) == ("prefill-0", None)
        block_bytes = first.kv_bytes // first.kv_blocks_sent
        cluster.up_to_date()
        second = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=other).result()
        assert second.prefill_worker == "prefill-1"
        assert first.token_ids == second.token_ids == tuple(greedy_tokens(model, prompt, TOKENS))
        check_moved(second, "prefill-0", 10 * BLOCK, block_bytes)
        assert second.prefill_cached_tokens == 10 * BLOCK
        assert second.kv_bytes == second.kv_bytes_expected == block_bytes, "decode has the rest"
        stages = second.breakdowns[Figure.TTFT].stages_ms
        assert stages["prefix_fetch"] == pytest.approx(second.prefix_fetch.duration_ms)  # type: ignore[union-attr]

        # Only decode has the KV of the answer.
        cluster.up_to_date()
        turn = [*prompt, *first.token_ids, *prompt_of(7, seed=2)]
        third = client.generate(turn, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=other).result()
        assert third.token_ids == tuple(greedy_tokens(model, turn, TOKENS))
        held = (len(prompt) + TOKENS - 1) // BLOCK  # the KV of the last token was never computed
        check_moved(third, "decode-0", (held - 10) * BLOCK, block_bytes)
        assert third.prefill_cached_tokens == held * BLOCK

        # On one worker alone, as well.
        cluster.up_to_date()
        alone = client.generate(
            turn, max_tokens=TOKENS, ignore_eos=True, mode="colocated", session_id=session_on("prefill-0", WORKERS)
        ).result()
        assert alone.token_ids == third.token_ids
        fetch = alone.prefix_fetch
        assert fetch is not None
        assert fetch.tokens == alone.prefill_cached_tokens - 10 * BLOCK
    cluster.wait_idle()
