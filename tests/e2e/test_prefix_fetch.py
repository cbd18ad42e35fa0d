"""KV of a prompt's beginning comes from the cache of another worker, and the answer is the same; without it, when the
other worker no longer has it, is killed or stopped, the prompt is computed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import xxhash

from pdserve import Client, Generation
from pdserve.client.status import ServiceStatus, ServiceWorker
from pdserve.core.errors import PdserveError, RequestAborted
from pdserve.core.timeline import Figure
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
NUM_BLOCKS = 80
TOKENS = 20
LONG = 30 * BLOCK + 3
"""Tokens of a prompt whose KV takes about 0.7 s over the slow links."""
LEASE_S = 30.0
WORKERS = ("prefill-0", "prefill-1", "decode-0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), next(iter(SHAPES)))


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[LocalCluster]:
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "engine": {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64},
        "router": {"policy": "session", "prefix_fetch": "always", "heartbeat_s": 0.1},
        "transfer": {"shape_gbps": 0.002, "lease_s": LEASE_S},
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


def worker_of(status: ServiceStatus, worker_id: str) -> ServiceWorker:
    return next(worker for worker in status.workers if worker.worker_id == worker_id)


def check_moved(generation: Generation, source: str, tokens: int, block_bytes: int) -> None:
    """So many tokens came from ``source``, and as many bytes as they have."""
    fetch = generation.prefix_fetch
    assert fetch is not None, generation.placements
    assert (fetch.source, fetch.tokens, fetch.tokens_wanted, fetch.failure) == (source, tokens, tokens, "")
    assert fetch.kv_bytes == fetch.kv_bytes_expected == tokens // BLOCK * block_bytes
    assert f"{tokens} tokens from {source} are fetched" in generation.placements[-1]


def test_a_conversation_moves_between_workers(model: Path, slow: LocalCluster) -> None:
    prompt = prompt_of(10 * BLOCK + 3, seed=1)
    mine, other = session_on("prefill-0"), session_on("prefill-1")
    with Client(slow.target) as client:
        first = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=mine).result()
        assert (first.prefill_worker, first.prefix_fetch) == ("prefill-0", None)
        block_bytes = first.kv_bytes // first.kv_blocks_sent
        slow.up_to_date()
        second = client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=other).result()
        assert second.prefill_worker == "prefill-1"
        assert first.token_ids == second.token_ids == tuple(greedy_tokens(model, prompt, TOKENS))
        check_moved(second, "prefill-0", 10 * BLOCK, block_bytes)
        assert second.prefill_cached_tokens == 10 * BLOCK
        assert second.kv_bytes == second.kv_bytes_expected == block_bytes, "decode has the rest"
        stages = second.breakdowns[Figure.TTFT].stages_ms
        assert stages["prefix_fetch"] == pytest.approx(second.prefix_fetch.duration_ms)  # type: ignore[union-attr]

        # Only decode has the KV of the answer.
        slow.up_to_date()
        turn = [*prompt, *first.token_ids, *prompt_of(7, seed=2)]
        third = client.generate(turn, max_tokens=TOKENS, ignore_eos=True, mode="pd", session_id=other).result()
        assert third.token_ids == tuple(greedy_tokens(model, turn, TOKENS))
        held = (len(prompt) + TOKENS - 1) // BLOCK  # the KV of the last token was never computed
        check_moved(third, "decode-0", (held - 10) * BLOCK, block_bytes)
        assert third.prefill_cached_tokens == held * BLOCK

        # On one worker alone, as well.
        slow.up_to_date()
        alone = client.generate(
            turn, max_tokens=TOKENS, ignore_eos=True, mode="colocated", session_id=session_on("prefill-0", WORKERS)
        ).result()
        assert alone.token_ids == third.token_ids
        fetch = alone.prefix_fetch
        assert fetch is not None
        assert fetch.tokens == alone.prefill_cached_tokens - 10 * BLOCK
    slow.wait_idle()


class Fetching:
    """A request on prefill-1 whose prefix is coming from prefill-0 (``cluster`` has slow links)."""

    def __init__(self, client: Client, cluster: LocalCluster, seed: int) -> None:
        self.prompt = prompt_of(LONG, seed)
        client.generate(self.prompt, max_tokens=1, session_id=session_on("prefill-0"), mode="pd").result()
        cluster.up_to_date()
        self.stream = client.generate(
            self.prompt, max_tokens=4, session_id=session_on("prefill-1"), mode="pd", timeout_s=60
        )
        self._results: list[Generation | PdserveError] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        deadline_s = time.monotonic() + 20
        while worker_of(status := client.status(), "prefill-1").free_blocks == NUM_BLOCKS or (
            worker_of(status, "prefill-0").free_blocks == NUM_BLOCKS
        ):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.01)

    def _read(self) -> None:
        try:
            self._results.append(self.stream.result())
        except PdserveError as error:
            self._results.append(error)

    def result(self) -> Generation | PdserveError:
        self._reading.join(60)
        return self._results[0]


def check_computed(model: Path, fetching: Fetching) -> None:
    """The prompt was computed on the same worker, in the first attempt."""
    generation = fetching.result()
    assert isinstance(generation, Generation)
    assert generation.token_ids == tuple(greedy_tokens(model, fetching.prompt, 4))
    assert (generation.prefill_worker, generation.attempts) == ("prefill-1", 1)
    assert generation.prefix_fetch is not None
    assert generation.prefix_fetch.tokens == generation.prefix_fetch.kv_bytes == generation.prefill_cached_tokens == 0
    assert generation.prefix_fetch.failure


def test_a_cancel_during_the_fetch_frees_the_blocks_of_both(slow: LocalCluster) -> None:
    with Client(slow.target) as client:
        fetching = Fetching(client, slow, seed=20)
        fetching.stream.cancel()
        assert isinstance(fetching.result(), RequestAborted)
        slow.wait_idle(LEASE_S / 2)  # sooner than by any timeout


def test_a_source_that_dies_is_not_waited_for(model: Path, slow: LocalCluster) -> None:
    with Client(slow.target) as client:
        fetching = Fetching(client, slow, seed=22)
        slow.kill("prefill-0")
        check_computed(model, fetching)
        slow.start_worker(Role.PREFILL, 0)
        slow.wait_ready()
        # The next one comes again.
        again = Fetching(client, slow, seed=23).result()
    assert isinstance(again, Generation)
    assert again.prefix_fetch is not None
    assert again.prefix_fetch.tokens == LONG // BLOCK * BLOCK
    slow.wait_idle()


def test_a_source_that_stands_still_is_not_waited_for(model: Path, slow: LocalCluster) -> None:
    with Client(slow.target) as client:
        fetching = Fetching(client, slow, seed=21)
        slow.kill("prefill-0", signal.SIGSTOP)
        try:
            check_computed(model, fetching)
        finally:
            slow.kill("prefill-0", signal.SIGCONT)
        slow.wait_ready()
    slow.wait_idle()


def test_a_decode_worker_that_dies_during_the_hand_off_costs_another_transfer_alone(
    model: Path, slow: LocalCluster
) -> None:
    """What prefill has computed is sent again, not computed again."""
    with Client(slow.target) as client:
        for seed in range(30, 40):  # until it is killed before all blocks are there
            prompt = prompt_of(LONG, seed)
            engine = slow.engine_pid("decode-0")
            stream = client.generate(prompt, max_tokens=4, session_id=session_on("prefill-0"), mode="pd", timeout_s=60)
            next(stream)
            psutil.Process(engine).kill()
            result = stream.result()
            assert list(result.token_ids) == greedy_tokens(model, prompt, 4)
            slow.wait_restarted("decode-0", engine)
            if result.attempts > 1:
                break
        else:
            raise AssertionError("every hand-off was over before its engine died")
    assert result.mode == "pd"
    assert result.prefill_cached_tokens >= LONG // BLOCK * BLOCK
    assert result.kv_bytes == result.kv_bytes_expected
    slow.wait_idle()
