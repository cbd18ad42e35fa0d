"""A request that is cancelled leaves its workers and gives its blocks back, in whatever state it is; and who loses
blocks to whom."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from benchmarks.request_states import NUM_BLOCKS, SHAPE, State, held, is_free, prompt_of, settings, until
from pdserve import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import RequestAborted
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import save_random

log = logging.getLogger(__name__)

FREE_WITHIN_S = 5.0  # tens of milliseconds on an idle machine: `benchmarks.overload`


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_random(folder, SHAPE, seed=3)
    with local_cluster(settings(str(folder))) as cluster:
        yield cluster


def uses_blocks(status: ServiceStatus, role: str) -> bool:
    """Whether a worker of the role has said so."""
    return any(worker.role == role and worker.free_blocks < worker.num_blocks for worker in status.workers)


async def test_a_cancel_frees_everything_in_every_state(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.target) as client:
        for state in State:
            async with held(client, state) as (request, blockers):
                role = "prefill" if state is State.PREFILLING else "decode"
                if not blockers:
                    await until(client, lambda status, role=role: uses_blocks(status, role))  # type: ignore[misc]
                assert not request.reading.done(), state
                began_s = time.monotonic()
                request.stream.cancel()
                if blockers:
                    await until(client, lambda status: status.queued == 0, FREE_WITHIN_S)
                    assert not any(blocker.reading.done() for blocker in blockers), "they go on"
                else:
                    await until(client, is_free, FREE_WITHIN_S)
                log.info("%s: free after %.0f ms", state, 1e3 * (time.monotonic() - began_s))
                await request.reading
                assert isinstance(request.error, RequestAborted), state
            await until(client, is_free)


async def test_a_request_of_lower_priority_loses_its_blocks_though_it_came_first(cluster: LocalCluster) -> None:
    """Both fit when they are admitted, and outgrow the pool while they decode."""
    prompts = [prompt_of(16 * (NUM_BLOCKS // 2 - 12), seed) for seed in (6, 7)]
    outputs = 400
    async with AsyncClient(cluster.target) as client:
        ended: list[int] = []

        async def run(priority: int, prompt: list[int]) -> tuple[int, ...]:
            stream = client.generate(
                prompt, max_tokens=outputs, ignore_eos=True, mode="pd", timeout_s=120, priority=priority
            )
            result = await stream.result()
            ended.append(priority)
            assert result.attempts == 1
            return result.token_ids

        alone = [await run(0, prompt) for prompt in prompts]
        await until(client, is_free)
        before = {w.worker_id: w.preemptions for w in (await client.status()).workers}
        ended.clear()
        low = asyncio.create_task(run(5, prompts[0]))
        await until(client, lambda status: status.running == 1)
        high = asyncio.create_task(run(-5, prompts[1]))
        assert [await low, await high] == alone
        status = await until(client, is_free)
        after = {w.worker_id: w.preemptions for w in status.workers}
        assert after["decode-0"] > before["decode-0"]
        assert ended == [-5, 5]
