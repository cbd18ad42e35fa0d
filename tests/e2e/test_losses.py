"""Processes that die or stand still, over real sockets: their requests go on elsewhere, with the tokens of a run
without faults. (`pdserve simulate` has every order of these events; here is what it cannot have: signals, connections
that the kernel closes, keep-alives.)"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve import AsyncClient, AsyncStream, Client
from pdserve.core.errors import NotReady
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import save_random_model

PROMPT = [(31 * i + i * i) % 307 for i in range(40)]
TOKENS = 400
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {
        "model": {"path": str(save_random_model(tmp_path_factory.mktemp("models"), "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 400, "hang_timeout_s": 4.0},
        "router": {"heartbeat_s": 0.1, "heartbeat_timeout_s": 3.0},
        "transfer": {"lease_s": 600.0},  # nothing here is noticed, or given back, by a lease that ends
    }
    with local_cluster(settings, decode=2, gateways=2) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("part", "signum"), [("worker", signal.SIGKILL), ("worker", signal.SIGSTOP), ("engine", signal.SIGSTOP)]
)
def test_a_decode_worker_that_is_lost_costs_no_token(cluster: LocalCluster, part: str, signum: signal.Signals) -> None:
    """Killed engines are in `tests.e2e.test_tokens`."""
    with Client(cluster.target) as client:
        expected = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).result().token_ids
        stream = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, mode="pd", timeout_s=60)
        for _ in range(5):
            next(stream)
        victim = max(cluster.inside().workers, key=lambda each: (each.role == "decode", each.outstanding_tokens))
        if part == "worker":
            cluster.kill(victim.worker_id, signum)
        else:
            os.kill(victim.engine_pid, signum)
        result = stream.result()
    assert result.token_ids == expected
    assert result.attempts > 1
    assert result.kv_bytes == result.kv_bytes_expected
    if signum == signal.SIGKILL:
        cluster.start_worker(Role.DECODE, int(victim.worker_id[-1]))
    elif part == "worker":
        cluster.kill(victim.worker_id, signal.SIGCONT)
    cluster.wait_ready()
    assert (cluster.engine_pid(victim.worker_id) == victim.engine_pid) == ((part, signum) == ("worker", signal.SIGSTOP))
    cluster.wait_idle()


async def some_tokens(stream: AsyncStream) -> None:
    for _ in range(5):
        await anext(stream)


async def test_a_killed_gateway_costs_its_own_streams_alone_which_go_on_at_another(cluster: LocalCluster) -> None:
    """Its workers outlive it, and report to the next one. The blocking client resumes, too."""
    async with AsyncClient(cluster.targets) as client, AsyncClient(cluster.targets[0]) as alone:
        greedy = (await alone.generate(PROMPT, max_tokens=TOKENS).result()).token_ids
        drawn = (await alone.generate(PROMPT, max_tokens=TOKENS, **SAMPLED).result()).token_ids
        streams = [
            client.generate(PROMPT, max_tokens=TOKENS, mode=mode, **sampling)
            for mode in ("pd", "colocated")
            for sampling in ({}, SAMPLED)
            for _ in range(2)
        ]
        left = alone.generate(PROMPT, max_tokens=TOKENS)
        with Client(cluster.targets) as blocking:
            blocked = blocking.generate(PROMPT, max_tokens=TOKENS)
            await asyncio.gather(
                *(some_tokens(stream) for stream in (*streams, left)), asyncio.to_thread(next, blocked)
            )
            assert blocked.target == cluster.targets[0]
            hit = [stream for stream in streams if stream.target == cluster.targets[0]]
            assert len(hit) == 4
            before = {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers}
            cluster.kill("gateway")
            *generations, last = await asyncio.gather(
                *(stream.result() for stream in streams), asyncio.to_thread(blocked.result)
            )
        assert (last.token_ids, last.resumes) == (greedy, 1)
        for index, (stream, generation) in enumerate(zip(streams, generations, strict=True)):
            assert generation.token_ids == (drawn if index // 2 % 2 else greedy)
            assert [token.index for token in generation.tokens] == list(range(TOKENS))
            assert generation.text == "".join(token.text for token in generation.tokens)
            assert generation.resumes == (stream in hit), "the streams of the other one are untouched"
            assert stream.target == cluster.targets[1]
        with pytest.raises(NotReady):  # a client that knows one gateway only loses the stream
            await left.result()
    cluster.wait_idle(target=cluster.targets[1])  # what the lost gateway had asked for has ended
    cluster.start_gateway()
    cluster.wait_ready()
    assert {worker.worker_id: worker.engine_pid for worker in cluster.inside().workers} == before


async def test_a_gateway_that_stops_is_given_up_after_a_while(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.targets) as client:
        streams = [client.generate(PROMPT, max_tokens=TOKENS) for _ in range(2)]
        await asyncio.gather(*(some_tokens(stream) for stream in streams))
        cluster.kill("gateway", signal.SIGSTOP)
        try:
            first, second = await asyncio.gather(*(stream.result() for stream in streams))
        finally:
            cluster.kill("gateway", signal.SIGCONT)
        assert first.token_ids == second.token_ids
        assert (first.resumes, second.resumes) == (1, 0)
    cluster.wait_ready()
    cluster.wait_idle()  # the gateway that had stopped ends the stream that nothing reads
