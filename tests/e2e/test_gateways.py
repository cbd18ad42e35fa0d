"""Several gateways over the same workers: each knows them all and their load, and the loss of one costs its own streams
alone, which a client resumes at another one."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve import AsyncClient, AsyncStream, Client
from pdserve.core.errors import NotReady
from pdserve.core.worker import Role
from tests.local_cluster import gateway_name, leaked_blocks, local_cluster
from tests.random_models import greedy_tokens, save_random_model

PROMPT = [11, 7, 200, 41, 5, 99, 3] * 12
TOKENS = 300
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
RESUME_S = 20.0  # generous: the machine is shared; benchmarks/gateways.py measures it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


@pytest.fixture(scope="module")
def settings(model: Path) -> dict[str, Any]:
    engine = {"block_size": 16, "num_blocks": 512, "max_num_batched_tokens": 64}
    return {"model": {"path": str(model), "dtype": "float32"}, "engine": engine}


async def some_tokens(stream: AsyncStream) -> None:
    for _ in range(5):
        await anext(stream)


async def test_a_killed_gateway_costs_its_own_streams_alone_which_go_on_at_another(
    model: Path, settings: dict[str, Any]
) -> None:
    expected = greedy_tokens(model, PROMPT, TOKENS)
    with local_cluster(settings, gateways=2) as cluster:
        async with AsyncClient(cluster.targets) as client, AsyncClient(cluster.targets[0]) as alone:
            drawn = (await alone.generate(PROMPT, max_tokens=TOKENS, **SAMPLED).result()).token_ids
            streams = [
                client.generate(PROMPT, max_tokens=TOKENS, mode=mode, **sampling)
                for mode in ("pd", "colocated")
                for sampling in ({}, SAMPLED)
                for _ in range(2)
            ]
            left = alone.generate(PROMPT, max_tokens=TOKENS)
            await asyncio.gather(*(some_tokens(stream) for stream in (*streams, left)))
            hit = [stream for stream in streams if stream.target == cluster.targets[0]]
            assert len(hit) == 4
            cluster.kill("gateway")
            killed_s = time.monotonic()
            generations = await asyncio.gather(*(stream.result() for stream in streams))
            for index, (stream, generation) in enumerate(zip(streams, generations, strict=True)):
                assert list(generation.token_ids) == list(drawn if index // 2 % 2 else expected)
                assert [token.index for token in generation.tokens] == list(range(TOKENS))
                assert generation.text == "".join(token.text for token in generation.tokens)
                assert (generation.prompt_tokens, generation.finish_reason) == (len(PROMPT), "length")
                assert generation.resumes == (stream in hit), "the streams of the other one are untouched"
                assert stream.target == cluster.targets[1]
                if stream in hit:
                    resumed_s = min(token.arrived_s for token in generation.tokens if token.arrived_s > killed_s)
                    assert resumed_s - killed_s < RESUME_S
            with pytest.raises(NotReady):  # whoever knows one gateway only loses the stream
                await left.result()
            after = await asyncio.gather(*(client.generate(PROMPT, max_tokens=4).result() for _ in range(4)))
            assert [list(generation.token_ids) for generation in after] == [expected[:4]] * 4
        status = cluster.wait_idle(target=cluster.targets[1])
        assert leaked_blocks(status) == 0, "what the lost gateway had asked for has ended"


async def test_a_gateway_that_stops_is_given_up_after_a_while(model: Path, settings: dict[str, Any]) -> None:
    expected = greedy_tokens(model, PROMPT, TOKENS)
    with local_cluster(settings, gateways=2) as cluster:
        async with AsyncClient(cluster.targets) as client:
            streams = [client.generate(PROMPT, max_tokens=TOKENS) for _ in range(2)]
            await asyncio.gather(*(some_tokens(stream) for stream in streams))
            cluster.kill("gateway", signal.SIGSTOP)
            stopped_s = time.monotonic()
            try:
                generations = await asyncio.gather(*(stream.result() for stream in streams))
            finally:
                cluster.kill("gateway", signal.SIGCONT)
            assert [list(generation.token_ids) for generation in generations] == [expected] * 2
            assert [generation.resumes for generation in generations] == [1, 0]
            resumed_s = min(token.arrived_s for token in generations[0].tokens if token.arrived_s > stopped_s + 1)
            assert resumed_s - stopped_s < 20.0 + RESUME_S / 2
        assert leaked_blocks(cluster.wait_idle()) == 0, "the gateway that had stopped ends the stream that nobody reads"


def test_the_blocking_client_resumes_too(model: Path, settings: dict[str, Any]) -> None:
    expected = greedy_tokens(model, PROMPT, TOKENS)
    with local_cluster(settings, gateways=2) as cluster, Client(",".join(cluster.targets)) as client:
        streams = [client.generate(PROMPT, max_tokens=TOKENS) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert [stream.target for stream in streams] == cluster.targets
        cluster.kill("gateway-1")
        generations = [stream.result() for stream in streams]
        assert [list(generation.token_ids) for generation in generations] == [expected] * 2
        assert [generation.resumes for generation in generations] == [0, 1]

        # One that comes again knows all workers, and clients use it again.
        cluster.start_gateway(1)
        cluster.wait_ready(target=cluster.targets[1])
        streams = [client.generate(PROMPT, max_tokens=4) for _ in range(4)]
        assert [list(stream.result().token_ids) for stream in streams] == [expected[:4]] * 4
        assert {stream.target for stream in streams} == set(cluster.targets)


def test_workers_come_before_any_gateway_and_outlive_them(model: Path, settings: dict[str, Any]) -> None:
    expected = greedy_tokens(model, PROMPT, 4)
    with local_cluster(settings, gateways=2) as cluster:
        before = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
        for number in range(2):
            cluster.kill(gateway_name(number))
            del cluster.processes[gateway_name(number)]
        cluster.start_worker(Role.PREFILL, 1)
        time.sleep(2.0)
        for number in (1, 0):
            cluster.start_gateway(number)
        for target in cluster.targets:
            cluster.wait_ready(target=target)
            with Client(target) as client:
                assert list(client.generate(PROMPT, max_tokens=4, mode="pd").result().token_ids) == expected
        workers = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
        assert workers.keys() == {"prefill-0", "prefill-1", "decode-0"}
        assert {name: workers[name] for name in before} == before, "none has started anew"


def test_each_gateway_sees_what_the_other_has_placed(settings: dict[str, Any]) -> None:
    """A decode worker that stands still with a request of one gateway gets none of the other's."""
    with (
        local_cluster(settings, decode=2, gateways=2) as cluster,
        Client(cluster.targets[0]) as first,
        Client(cluster.targets[1]) as second,
        first.generate(PROMPT, max_tokens=400, ignore_eos=True, mode="pd") as reading,
    ):
        next(reading)
        busy = worker_with_tokens(first)
        engine = psutil.Process(next(w.engine_pid for w in cluster.inside().workers if w.worker_id == busy))
        engine.suspend()
        try:
            assert worker_with_tokens(second) == busy
            for _ in range(3):
                assert second.generate(PROMPT, max_tokens=2, mode="pd").result().decode_worker != busy
        finally:
            engine.resume()


def worker_with_tokens(client: Client) -> str:
    """The decode worker that has most to do, once one has."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        loads = {w.worker_id: w.outstanding_tokens for w in client.status().workers if w.role == "decode"}
        busy = max(loads, key=lambda worker_id: loads[worker_id])
        if loads[busy] > 20:
            return busy
        time.sleep(0.02)
    raise AssertionError("no gateway reports the load")
