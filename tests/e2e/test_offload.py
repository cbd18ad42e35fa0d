"""Prompts that the pools have forgotten are found in the folder of cold blocks, after a crash as well."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.generation import Generation
from pdserve.client.status import ServiceWorker
from pdserve.core.prefix_digests import PrefixDigests, keyed_salt
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster
from tests.random_models import SHAPES, greedy_tokens, save_random_model

BLOCK = 16
NUM_BLOCKS = 16
LENGTH = 6 * BLOCK + 3
TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), next(iter(SHAPES)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload") / "cold"


@pytest.fixture(scope="module")
def cluster(model: Path, folder: Path) -> Iterator[LocalCluster]:
    engine = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "offload_folder": str(folder), "offload_disk_mb": 64}
    with local_cluster({"model": {"path": str(model), "dtype": "float32"}, "engine": engine}) as started:
        yield started


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(307) for _ in range(LENGTH)]


def forget(client: Client, seed: int) -> None:
    """Fill all pools with other prompts."""
    for other in range(6):
        client.generate(prompt(seed * 100 + other), max_tokens=2, mode="pd").result()


def prefill(cluster: LocalCluster) -> ServiceWorker:
    (worker,) = (worker for worker in cluster.inside().workers if worker.worker_id == "prefill-0")
    return worker


def written(worker: Path, seed: int, cluster: LocalCluster) -> None:
    """Return when the full blocks of a prompt have their files."""
    digests = PrefixDigests(keyed_salt("", cluster.secret.cache_key), BLOCK).first(LENGTH // BLOCK, prompt(seed))
    deadline_s = time.monotonic() + 60
    while not all((worker / digest.hex()).exists() for digest in digests):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def check(result: Generation, model: Path, seed: int) -> None:
    assert result.token_ids == tuple(greedy_tokens(model, prompt(seed), TOKENS))


def test_a_forgotten_prompt_is_read_and_handed_over(model: Path, folder: Path, cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        first = client.generate(prompt(1), max_tokens=TOKENS, mode="pd").result()
        forget(client, 1)
        second = client.generate(prompt(1), max_tokens=TOKENS, mode="pd").result()
    for result in (first, second):
        check(result, model, 1)
        assert result.kv_bytes == result.kv_bytes_expected
    assert (first.prefill_cached_tokens, second.prefill_cached_tokens) == (0, 6 * BLOCK)
    status = cluster.wait_idle()
    assert leaked_blocks(status) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["decode-0", "prefill-0"]


def test_an_engine_that_was_killed_finds_its_blocks_again(model: Path, folder: Path, cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        cold = client.generate(prompt(2), max_tokens=TOKENS, mode="pd").result()
        check(cold, model, 2)
        forget(client, 2)
        cluster.wait_idle()
        written(folder / "prefill-0", 2, cluster)
        os.kill(prefill(cluster).engine_pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while prefill(cluster).engine_restarts == 0 or prefill(cluster).state != "ready":
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        cluster.wait_ready()
        again = client.generate(prompt(2), max_tokens=TOKENS, mode="pd").result()
    check(again, model, 2)
    assert again.prefill_cached_tokens == 6 * BLOCK
    assert leaked_blocks(cluster.wait_idle()) == 0
