"""Workers whose engine is a vLLM server with pdserve's connector: real processes with the real connector in a recorded
vLLM, behind the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from pdserve import AsyncClient
from pdserve.client.generation import Generation
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, DeadlineExceeded, LaunchError, LayoutMismatch, NotReady
from pdserve.core.timeline import Figure
from tests.external_engines.connected_vllm import HEAD_DIM, HEADS, NUM_LAYERS, STEP_TOKENS
from tests.external_engines.recorded_command import started
from tests.external_engines.recorded_vllm import greedy
from tests.external_engines.served import EXPECTED, Service
from tests.external_engines.test_started_servers import config_of, started_service
from worker.worker import Worker

LONG = [3 + number * 7 % 190 for number in range(150)]
"""A prompt of several steps and blocks."""


def connected(folder: Path, **settings: Any) -> PdserveConfig:
    return config_of(folder, **{"worker.connector": "pdserve", "model.dtype": "float32", **settings})


@asynccontextmanager
async def service(
    folder: Path, prefill: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Service[Worker]]:
    """``prefill`` are further settings of the prefill worker."""
    try:
        configs = connected(folder, **{**settings, **(prefill or {})}), connected(folder, **settings)
        async with (
            started_service(*configs) as (gateway, workers),
            AsyncClient(f"127.0.0.1:{gateway.port}") as client,
        ):
            served = Service(gateway, client, *workers)
            yield served
            await served.until(lambda: {worker.free_blocks for worker in served.workers().values()} == {64})
    finally:
        assert not [each for each in started(folder) if psutil.pid_exists(each["pid"])]  # type: ignore[arg-type]


shared = pytest.mark.asyncio(loop_scope="module")
"""Marks the tests that share ``serving``. Each has prompts of its own, since the servers cache them."""


def drawn(seed: int) -> list[int]:
    """A prompt as long as `LONG` that no other test has."""
    rng = random.Random(seed)
    return [rng.randrange(3, 200) for _ in LONG]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service[Worker]]:
    async with service(tmp_path_factory.mktemp("servers")) as served:
        await served.ready()
        yield served


async def ask(served: Service[Worker], prompt: list[int], mode: str = "pd", max_tokens: int = 8) -> Generation:
    stream = served.client.generate(prompt, max_tokens=max_tokens, mode=mode, ignore_eos=True, timeout_s=30.0)
    return await stream.result()


async def ask_more_than_the_pool_holds(served: Service[Worker]) -> None:
    await served.ready()
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 200) for _ in range(rng.randrange(5, 200))] for _ in range(30)]
    results = await asyncio.gather(*(ask(served, prompt) for prompt in prompts))
    assert [list(result.token_ids) for result in results] == [greedy(prompt, 8) for prompt in prompts]
    assert all(result.kv_bytes == result.kv_bytes_expected for result in results)
    assert {result.attempts for result in results} == {1}


async def end_a_server(served: Service[Worker], name: str) -> None:
    """While it has requests, which go on."""
    await served.ready()
    asked = [asyncio.create_task(ask(served, LONG[number:], max_tokens=60)) for number in range(6)]
    await served.until(lambda: any(worker.running for worker in served.workers().values()))
    os.kill(served.workers()[name].engine_pid, signal.SIGKILL)
    results = await asyncio.gather(*asked)
    assert [list(result.token_ids) for result in results] == [greedy(LONG[number:], 60) for number in range(6)]
    await served.until(lambda: served.workers()[name].engine_restarts == 1)


@pytest.mark.parametrize(
    ("transport", "overlap"), [("tcp", "chunk"), ("shm", "layer"), pytest.param("shm", "none", marks=pytest.mark.soak)]
)
async def test_a_hand_off_by_our_transports(tmp_path: Path, transport: str, overlap: str) -> None:
    async with service(tmp_path, None, **{"transfer.transport": transport, "transfer.overlap": overlap}) as served:
        await served.ready()
        result = await ask(served, LONG)
        assert list(result.token_ids) == greedy(LONG, 8)
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        assert result.kv_bytes == result.kv_bytes_expected > 0
        assert result.transport == transport
        stages = result.breakdowns[Figure.TTFT_DECODE].stages_ms
        assert {"prefill_queue", "prefill", "kv_exposed", "decode_queue", "first_decode"} <= stages.keys()
        assert [link.transport for link in served.workers()["prefill-0"].links] == [transport]
        for prompt in (LONG[:143], LONG[:144]):  # token 1 ends a block, the prompt does
            assert list((await ask(served, prompt)).token_ids) == greedy(prompt, 8)
        assert list((await ask(served, LONG, "colocated")).token_ids) == greedy(LONG, 8)
        assert list((await ask(served, LONG, max_tokens=1)).token_ids) == greedy(LONG, 1)


@shared
async def test_steps_are_those_of_the_server(serving: Service[Worker]) -> None:
    """One for all requests that it computes together, also where no token comes of it."""

    def since(before: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
        workers = serving.workers().items()
        return {name: (each.steps - before[name][0], each.busy_s - before[name][1]) for name, each in workers}

    def numbers() -> dict[str, int]:
        return {name: steps for name, (steps, _) in since(before).items()}

    prompt = drawn(1)
    await serving.until(lambda: all(not each.running for each in serving.workers().values()))
    before = {name: (each.steps, each.busy_s) for name, each in serving.workers().items()}
    began_s = time.monotonic()
    await ask(serving, prompt)
    steps = {"prefill-0": -(-len(prompt) // STEP_TOKENS), "decode-0": 7}
    await serving.until(lambda: numbers() == steps)
    await asyncio.gather(*(ask(serving, prompt[number:], max_tokens=20) for number in range(6)))
    await serving.until(lambda: numbers()["decode-0"] >= 7 + 19)
    await serving.until(lambda: all(not each.running for each in serving.workers().values()))
    took_s = time.monotonic() - began_s
    assert all(0 < busy_s < took_s for _, busy_s in since(before).values())


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
async def test_ranks_share_blocks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Of prefill and of decode. Also a hand-off between unequal numbers of ranks moves blocks as they are."""
    prefill, decode = ({"worker.arguments": ["--tensor-parallel-size", str(each)]} for each in ranks)
    async with service(tmp_path, prefill, **decode) as served:
        await served.ready()
        for prompt in (LONG, LONG[:96], LONG):
            result = await ask(served, prompt)
            assert list(result.token_ids) == greedy(prompt, 8)
            assert result.kv_bytes == result.kv_bytes_expected
        results = await asyncio.gather(*(ask(served, LONG[number:]) for number in range(8)))
        assert [list(result.token_ids) for result in results] == [greedy(LONG[number:], 8) for number in range(8)]


@shared
async def test_prompts_that_decode_has_cached(serving: Service[Worker]) -> None:
    """Only what it lacks is sent; after a prompt that it has cached as a whole, only token 1."""
    whole = drawn(2)
    for prompt, cached in ((whole[:32], 0), (whole[:40], 32), (whole[:96], 32), (whole[:96], 96), (whole, 96)):
        result = await ask(serving, prompt)
        assert list(result.token_ids) == greedy(prompt, 8)
        assert result.kv_bytes == result.kv_bytes_expected
        blocks = -(-len(prompt) // 16) - cached // 16
        assert result.kv_bytes == blocks * NUM_LAYERS * HEADS * 2 * HEAD_DIM * 16 * 4


@shared
async def test_more_prompts_than_the_pool_holds(serving: Service[Worker]) -> None:
    await ask_more_than_the_pool_holds(serving)


async def test_requests_survive_the_end_of_a_server(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        for name in ("prefill-0", "decode-0"):
            await end_a_server(served, name)


async def test_a_prompt_that_vllm_preempts_is_computed_again(tmp_path: Path) -> None:
    async with service(tmp_path, prefill={"worker.arguments": ["--preempts"]}) as served:
        await served.ready()
        result = await ask(served, LONG)
        assert list(result.token_ids) == greedy(LONG, 8)
        assert [failed.error for failed in result.failures] == ["TransferError"]
        # Which of the two workers tells it first is open.
        assert re.search("vLLM has preempted|the sender of .* gave up", result.failures[0].text)


@shared
async def test_a_client_that_leaves(serving: Service[Worker]) -> None:
    for leaves_after in (0, 10):
        stream = serving.client.generate(drawn(3), max_tokens=300, mode="pd", ignore_eos=True)
        async for token in stream:
            if token.index == leaves_after:
                break
        await stream.aclose()
    assert list((await serving.generate()).token_ids) == EXPECTED


@shared
async def test_a_deadline_passes_while_decode_waits_for_kv(serving: Service[Worker]) -> None:
    pid, prompt = serving.workers()["prefill-0"].engine_pid, drawn(4)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded):
            await serving.client.generate(prompt, max_tokens=8, mode="pd", timeout_s=1.0).result()
    finally:
        os.kill(pid, signal.SIGCONT)
    await serving.until(lambda: {worker.free_blocks for worker in serving.workers().values()} == {64})
    assert list((await ask(serving, prompt)).token_ids) == greedy(prompt, 8)


async def asked_when_linked(served: Service[Worker]) -> None:
    """Ask until a link was tried."""
    while True:
        with contextlib.suppress(NotReady):
            await ask(served, LONG)


async def test_servers_whose_blocks_differ_are_no_pair(tmp_path: Path) -> None:
    async with service(tmp_path, prefill={"engine.block_size": 32}) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match="block_size"):
            await asked_when_linked(served)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker.arguments": ["--fails"]}, r"vLLM ended while it started \(exit status 3\)"),
        ({"worker.command": "/no/such/program"}, "worker.command: there is no program '/no/such/program' on 127.0.0.1"),
    ],
)
async def test_a_server_that_does_not_start(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        async with service(tmp_path, **settings):
            pass


def test_the_connector_is_one_of_vllm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.connector: pdserve's own engine needs none"):
        PdserveConfig.load(None, {"worker.connector": "pdserve"})
