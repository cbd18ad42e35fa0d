"""A seeded churn: random requests, cancels and deadlines while engines are killed. `make soak`.

Whatever is delivered equals the fault-free run, bytes moved equal bytes predicted, and afterwards every block is free.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from pathlib import Path

import psutil
import pytest

from pdserve import AsyncClient
from pdserve.core.errors import DeadlineExceeded, NotReady, RequestAborted, TransferError, WorkerLost
from tests.local_cluster import LocalCluster, leaked_blocks, local_cluster
from tests.random_models import save_random_model

log = logging.getLogger(__name__)

SEED = 20
REQUESTS = 6_000
CONCURRENCY = 8
KILL_EVERY = 80  # requests
PROMPTS = 24


async def fault_free(client: AsyncClient, draw: random.Random) -> list[tuple[list[int], tuple[int, ...]]]:
    lengths = [1, 15, 16, 17, 31, 64, 65, 130, 200]
    prompts = [[draw.randrange(307) for _ in range(draw.choice(lengths))] for _ in range(PROMPTS)]
    runs = [await client.generate(prompt, max_tokens=24, mode="colocated").result() for prompt in prompts]
    return [(prompt, run.token_ids) for prompt, run in zip(prompts, runs, strict=True)]


async def churn(cluster: LocalCluster, count: int) -> Counter[str]:
    draw, outcomes = random.Random(SEED), Counter[str]()
    async with AsyncClient(cluster.target) as client, AsyncClient(cluster.operator) as operator:
        known = await fault_free(client, draw)
        left = iter(range(count))
        kill = asyncio.Event()

        async def requests() -> None:
            for number in left:
                if number % KILL_EVERY == KILL_EVERY // 2:
                    kill.set()
                prompt, expected = draw.choice(known)
                wanted = draw.choice((1, 2, 3, 24))
                mode = draw.choice(("pd", "pd", "colocated"))
                fate = draw.choice(("finish",) * 8 + ("cancel", "hurry"))
                salt = str(draw.random()) if draw.random() < 0.7 else ""  # most find no block in any cache: all travel
                timeout_s = 0.05 if fate == "hurry" else 60.0
                stream = client.generate(prompt, max_tokens=wanted, mode=mode, timeout_s=timeout_s, salt=salt)
                try:
                    if fate == "cancel":
                        await anext(stream)
                        stream.cancel()
                    result = await stream.result()
                    assert result.token_ids == expected[:wanted]
                    assert result.kv_bytes == result.kv_bytes_expected
                    outcomes["equal"] += 1
                    outcomes["transfers"] += result.kv_bytes > 0
                except (RequestAborted, DeadlineExceeded) as error:
                    outcomes[f"{fate}: {type(error).__name__}"] += 1
                except (NotReady, WorkerLost, TransferError) as error:  # attempts used up: allowed, but told
                    outcomes[type(error).__name__] += 1

        async def kills() -> None:
            while True:
                await kill.wait()
                kill.clear()
                ready = [w for w in (await operator.status()).workers if w.state == "ready"]
                if len(ready) == 4:
                    psutil.Process(draw.choice(ready).engine_pid).kill()
                    outcomes["killed"] += 1

        killing = asyncio.create_task(kills())
        try:
            await asyncio.gather(*(requests() for _ in range(CONCURRENCY)))
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
    return outcomes


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc_stream", "torch_dist"])
def test_churn_with_dying_engines(tmp_path: Path, transport: str) -> None:
    settings = {
        "model": {"path": str(save_random_model(tmp_path, "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 128, "max_num_batched_tokens": 64},
        "transfer": {"transport": transport},
    }
    with local_cluster(settings, prefill=2, decode=2) as cluster:
        outcomes = asyncio.run(churn(cluster, REQUESTS))
        assert leaked_blocks(cluster.wait_idle(30)) == 0
    log.info("%s: %s", transport, dict(outcomes))
    assert not [outcome for outcome in outcomes if outcome.startswith("finish")], outcomes
    assert outcomes["equal"] > 0.7 * REQUESTS, outcomes
    assert outcomes["killed"] >= 8, outcomes
    assert outcomes["transfers"] > 0.3 * REQUESTS, outcomes
