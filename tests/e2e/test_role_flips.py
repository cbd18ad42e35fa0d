"""Workers take another role while they serve: requests go on token by token, and every block is free afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from benchmarks.request_states import OUTPUTS, PROMPTS, SHAPE, State, held, is_free, prompt_of, settings, until
from pdserve import AsyncClient, Generation
from pdserve.client.status import ServiceStatus
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import save_random

SHORT_OUTPUTS = 12
P, D = Role.PREFILL, Role.DECODE


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_random(folder, SHAPE, seed=3)
    with local_cluster(settings(str(folder)), prefill=1, decode=2, gateways=2, may_flip=True) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client


def roles(status: ServiceStatus) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in status.workers if worker.state == "ready"}


async def flip(cluster: LocalCluster, **to: Role) -> None:
    """Flip, and wait until every gateway gives the workers the work of their new roles."""
    cluster.flip(**to)
    for target in cluster.targets:
        await asyncio.to_thread(cluster.wait_ready, 30.0, target)


async def answer(client: AsyncClient, prompt: list[int], outputs: int) -> Generation:
    return await client.generate(prompt, max_tokens=outputs, ignore_eos=True, mode="pd").result()


async def test_requests_go_on_while_their_workers_take_other_roles(cluster: LocalCluster, client: AsyncClient) -> None:
    """Each state a request may be in. In each the prefill worker becomes a decode worker and a decode worker takes its
    place, so that both workers of the request have another role than when it was placed there."""
    short = prompt_of(40, 9)
    expected_short = (await answer(client, short, SHORT_OUTPUTS)).token_ids
    for state in (State.QUEUED, State.PREFILLING, State.TRANSFERRING, State.DECODING):
        expected = (await answer(client, PROMPTS[state], OUTPUTS)).token_ids
        async with held(client, state) as (request, blockers):
            await flip(cluster, prefill_0=D, decode_0=P, decode_1=P)
            assert not request.reading.done() or state is State.QUEUED, "the flip is faster than the request"
            # The others serve in their new roles meanwhile.
            after = await answer(client, short, SHORT_OUTPUTS)
            assert (after.decode_worker, after.token_ids) == ("prefill-0", expected_short)
            assert after.prefill_worker in ("decode-0", "decode-1")
            await asyncio.wait_for(asyncio.gather(request.reading, *(each.reading for each in blockers)), 60.0)
            assert request.error is None
            assert tuple(request.tokens) == expected
            generation = await request.stream.result()
            assert generation.attempts == 1, "nothing was lost"
        await until(client, is_free)
        await flip(cluster, prefill_0=P, decode_0=D, decode_1=D)
    other = cluster.targets[1]
    async with AsyncClient(other) as second:
        assert roles(await second.status()) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def test_a_flipped_worker_comes_back_with_its_role(cluster: LocalCluster, client: AsyncClient) -> None:
    """Its process starts with the role it was born with; a gateway that starts anew is told the roles again."""
    await flip(cluster, decode_1=P)
    expected = (await answer(client, PROMPTS[State.DECODING], SHORT_OUTPUTS)).token_ids
    await asyncio.to_thread(cluster.kill, "decode-1", signal.SIGKILL)
    cluster.start_worker(D, 1)
    await asyncio.to_thread(cluster.wait_ready)
    now = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    assert roles(await client.status()) == now
    await asyncio.to_thread(cluster.kill, "gateway-1", signal.SIGKILL)
    cluster.start_gateway(1)
    await asyncio.to_thread(cluster.wait_ready, 60.0, cluster.targets[1])
    async with AsyncClient(cluster.targets[1]) as second:
        assert roles(await second.status()) == now
        answers = await asyncio.gather(*(answer(second, PROMPTS[State.DECODING], SHORT_OUTPUTS) for _ in range(4)))
        assert {each.token_ids for each in answers} == {expected}
        assert {each.prefill_worker for each in answers} == {"prefill-0", "decode-1"}
    await until(client, is_free)
    await flip(cluster, decode_1=D)
