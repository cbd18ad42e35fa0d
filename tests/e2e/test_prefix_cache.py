"""A prompt's second coming finds its KV on both sides, computes the rest, moves the rest, and says the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), next(iter(SHAPES)))


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    engine = {"block_size": BLOCK, "num_blocks": 64, "max_num_batched_tokens": 64}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as started:
        yield started


def counts(status: ServiceStatus) -> dict[str, tuple[int, int]]:
    return {w.worker_id: (w.prompt_tokens_looked_up, w.prompt_tokens_cached) for w in status.workers}


def reported(cluster: LocalCluster, looked_up: int) -> ServiceStatus:
    """The idle service's status once the workers' heartbeats tell of so many tokens."""
    deadline_s = time.monotonic() + 60
    while True:
        status = cluster.wait_idle()
        if sum(tokens for tokens, _ in counts(status).values()) >= looked_up or time.monotonic() > deadline_s:
            return status
        time.sleep(0.1)


def up_to_date(cluster: LocalCluster) -> ServiceStatus:
    """The idle service's status, with each worker's second heartbeat from now: the first may have left before."""
    seen: dict[str, list[float]] = {}
    while True:
        status = cluster.wait_idle()
        now_s = time.monotonic()
        for worker in status.workers:
            beats, beat_s = seen.setdefault(worker.worker_id, []), now_s - worker.heartbeat_age_s
            if not beats or beat_s > beats[-1] + 0.1:
                beats.append(beat_s)
        if all(len(beats) > 2 for beats in seen.values()):
            return status
        time.sleep(0.05)


@pytest.mark.parametrize("length", [5 * BLOCK + 3, 5 * BLOCK])
def test_a_prompt_comes_again(model: Path, cluster: LocalCluster, length: int) -> None:
    draw = random.Random(length)
    prompt = [draw.randrange(307) for _ in range(length)]
    before = counts(up_to_date(cluster))
    with Client(cluster.target) as client:
        first, second = (client.generate(prompt, max_tokens=TOKENS, mode="pd").result() for _ in range(2))
        other = client.generate(prompt, max_tokens=TOKENS, mode="pd", salt="another tenant").result()
        together = client.generate(prompt, max_tokens=TOKENS, mode="colocated").result()
    assert first.token_ids == second.token_ids == other.token_ids == together.token_ids
    assert first.token_ids == tuple(greedy_tokens(model, prompt, TOKENS))

    for cold in (first, other):
        assert (cold.prefill_cached_tokens, cold.kv_blocks_skipped) == (0, 0)
        assert cold.kv_bytes == cold.kv_bytes_expected > 0
    block_bytes = first.kv_bytes // first.kv_blocks_sent
    total = -(-length // BLOCK)
    assert second.prefill_cached_tokens == (length - 1) // BLOCK * BLOCK  # one token at least is computed
    assert second.kv_blocks_skipped == length // BLOCK == 5  # decode needs none of it computed
    assert second.kv_blocks_sent == total - 5
    assert second.kv_bytes == second.kv_bytes_expected == (total - 5) * block_bytes
    assert together.prefill_cached_tokens == second.prefill_cached_tokens

    # Three prompts on both workers, and the colocated one on either.
    status = reported(cluster, sum(tokens for tokens, _ in before.values()) + 7 * length)
    assert leaked_blocks(status) == 0
    for worker, (tokens, cached) in counts(status).items():
        assert tokens - before[worker][0] in (3 * length, 4 * length)
        assert cached - before[worker][1] >= second.prefill_cached_tokens
    assert all(worker.cached_blocks > 0 for worker in status.workers)


def test_prompts_grow_and_share_while_others_run(model: Path, cluster: LocalCluster) -> None:
    """A conversation: each turn is the last one, its answer, and more; turns of several at once."""
    draw = random.Random(3)
    with Client(cluster.target) as client:
        beginning = [draw.randrange(307) for _ in range(2 * BLOCK)]
        prompts = [beginning + [draw.randrange(307) for _ in range(5 + index)] for index in range(4)]
        for turn in range(3):
            mode = ("pd", "colocated", "pd")[turn]
            streams = [client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, mode=mode) for prompt in prompts]
            for index, stream in enumerate(streams):
                result = stream.result()
                assert result.token_ids == tuple(greedy_tokens(model, prompts[index], TOKENS))
                assert result.kv_bytes == result.kv_bytes_expected
                prompts[index] = [*prompts[index], *result.token_ids, *(draw.randrange(307) for _ in range(9))]
                if turn:
                    assert result.prefill_cached_tokens >= 2 * BLOCK
    assert leaked_blocks(cluster.wait_idle()) == 0


def test_what_a_request_received_is_kept_even_if_nothing_was_left_to_decode(model: Path, cluster: LocalCluster) -> None:
    prompt = [(7 * index) % 307 for index in range(3 * BLOCK + 2)]
    (stop,) = greedy_tokens(model, prompt, 1)
    with Client(cluster.target) as client:
        first, second = (
            client.generate(prompt, max_tokens=4, stop_token_ids=[stop], mode="pd", salt="stop").result()
            for _ in range(2)
        )
    assert first.token_ids == second.token_ids == (stop,)
    assert (first.kv_blocks_skipped, second.kv_blocks_skipped) == (0, 3)
    assert second.kv_bytes == second.kv_bytes_expected == first.kv_bytes // 4
    assert leaked_blocks(cluster.wait_idle()) == 0
