"""Workers whose model is split over several processes, handing KV over to workers with another number of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve import AsyncClient, Client
from tests.e2e.test_tokens import EVERYTHING, prompt_of
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import greedy_tokens, save_random_model

BLOCK, TOKENS = 16, 12
DEGREES = [(1, 2), (4, 2), (2, 1), (2, 2), (2, 4), (1, 4)]
"""Processes of a prefill and of a decode worker. The model has two KV heads."""


def first(count: int) -> list[Any]:
    """The first ``count`` degrees; the others run in `make soak`."""
    return [*DEGREES[:count], *(pytest.param(each, marks=pytest.mark.soak) for each in DEGREES[count:])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@pytest.fixture(scope="module", params=first(2), ids=str)
def cluster(request: pytest.FixtureRequest, model: Path) -> Iterator[LocalCluster]:
    prefill, decode = request.param
    engine: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 64, "max_num_batched_tokens": 64}
    engine |= {"tensor_parallel": {"prefill": prefill, "decode": decode}, "hang_timeout_s": 8}
    engine["speculation"] = str(model) if prefill > decode > 1 else "ngram"  # a draft model, whole in rank 0
    settings = {"model": {"path": str(model), "dtype": "float32"}, "engine": engine, "router": {"heartbeat_s": 0.2}}
    with local_cluster(settings) as started:
        yield started


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.target) as client:
        yield client
    cluster.wait_idle()


@pytest.mark.parametrize("length", [1, BLOCK + 1, 230])
def test_tokens_are_those_of_one_process(client: Client, model: Path, length: int) -> None:
    prompt = prompt_of(length, length)
    apart = client.generate(prompt, max_tokens=TOKENS, mode="pd").result()
    together = client.generate(prompt, max_tokens=TOKENS, mode="colocated").result()
    assert apart.token_ids == together.token_ids == tuple(greedy_tokens(model, prompt, TOKENS))
    assert apart.kv_bytes == apart.kv_bytes_expected > 0


def test_guesses_change_no_token(client: Client, model: Path, request: pytest.FixtureRequest) -> None:
    prompt = [*prompt_of(20, 1)] * 3
    result = client.generate(prompt, max_tokens=40, mode="pd", speculation=True).result()
    assert result.token_ids == tuple(greedy_tokens(model, prompt, 40))
    assert result.draft_tokens > 0
    prefill, decode = request.node.callspec.params["cluster"]
    if prefill > decode > 1:  # with the model itself as the draft model
        assert result.accepted_draft_tokens == result.draft_tokens > 20


def test_all_of_sampling(client: Client) -> None:
    apart, together = (
        client.generate(prompt_of(40, 40), max_tokens=30, seed=3, mode=mode, **EVERYTHING).result()
        for mode in ("pd", "colocated")
    )
    assert apart.token_ids == together.token_ids


@pytest.mark.parametrize("cluster", first(1), indirect=True, ids=str)
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
async def test_a_rank_that_fails_ends_the_engine_of_its_worker(
    cluster: LocalCluster, model: Path, signum: signal.Signals
) -> None:
    """In steps and in transfers: requests go on elsewhere or with the next engine, and no token is wrong."""
    prompts = [prompt_of(length, length) for length in range(100, 160, 2)]
    expected = [tuple(greedy_tokens(model, prompt, 4 * TOKENS)) for prompt in prompts]
    async with AsyncClient(cluster.target) as client:
        for worker in (await client.status()).workers:
            asked = [client.generate(prompt, max_tokens=4 * TOKENS, timeout_s=100.0) for prompt in prompts]
            results = asyncio.gather(*(stream.result() for stream in asked))
            await asyncio.sleep(0.2)
            engine = _engine(cluster, worker.worker_id)
            ranks = engine.children()
            os.kill((ranks[-1] if ranks else engine).pid, signum)
            assert [result.token_ids for result in await results] == expected
            psutil.wait_procs([engine, *ranks], timeout=20.0)
            assert not engine.is_running()
            assert not any(rank.is_running() for rank in ranks)
            async with asyncio.timeout(60.0):
                while any(each.state != "ready" for each in (await client.status()).workers):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
    cluster.wait_idle()


def _engine(cluster: LocalCluster, worker_id: str) -> psutil.Process:
    (engine,) = (
        child
        for child in psutil.Process(cluster.processes[worker_id].pid).children()
        if "engine.process.loop" in child.cmdline()
    )
    return engine
