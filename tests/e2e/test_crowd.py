"""A crowd: many streams at once, of which a tenth is cancelled at random moments, while some of the clients' processes
are killed. Nothing leaks, and whoever stays gets its tokens. 1,000 streams of 50 processes in `make soak`, fewer in
`make test`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from pdserve import AsyncClient
from pdserve.core.errors import RequestAborted
from tests.local_cluster import ROOT, LocalCluster, local_cluster
from tests.random_models import greedy_tokens, save_random_model

log = logging.getLogger(__name__)

SEED = 9
PROMPT = [11, 7, 200, 41, 5, 99, 3] * 6
TOKENS = 64
CANCELLED_SHARE = 0.1
STREAMS_EACH = 20
TIMEOUT_S = 600.0
LEFT_S = 60.0
"""How long what was killed or cancelled may hold anything."""


async def crowd(target: str, count: int, seed: int) -> Counter[str]:
    """So many streams at once; what became of them. Prints a line when the first token of each has come."""
    draw, outcomes, begun = random.Random(seed), Counter[str](), 0

    async def ask(number: int, client: AsyncClient) -> None:
        nonlocal begun
        is_cancelled, after = draw.random() < CANCELLED_SHARE, draw.randrange(TOKENS)
        stream = client.generate(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, salt=f"{seed} {number}", timeout_s=TIMEOUT_S
        )
        try:
            async for token in stream:
                begun += token.index == 0
                if begun == count and token.index == 0:
                    print("all have begun", flush=True)  # noqa: T201 - for the test
                if is_cancelled and token.index == after:
                    stream.cancel()
            result = await stream.result()
        except RequestAborted:
            outcomes["cancelled" if is_cancelled else "aborted"] += 1
        else:
            outcomes[str(list(result.token_ids))] += 1

    async with AsyncClient(target) as client:
        await asyncio.gather(*(ask(number, client) for number in range(count)))
    return outcomes


def held_by(process: psutil.Process) -> tuple[int, int]:
    """Open files and threads."""
    return process.num_fds(), process.num_threads()


def run(cluster: LocalCluster, expected: list[int], processes: int, killed: int) -> Counter[str]:
    """A crowd, checked; what became of its streams."""
    draw = random.Random(SEED)
    service = {name: psutil.Process(popen.pid) for name, popen in cluster.processes.items()}
    before = {name: held_by(process) for name, process in service.items()}
    command = [sys.executable, "-m", "tests.e2e.test_crowd", cluster.target, str(STREAMS_EACH)]
    clients = [
        subprocess.Popen([*command, str(seed)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for seed in range(processes)
    ]
    try:
        victims = draw.sample(clients, killed)
        for victim in victims:  # while its streams are in all states
            assert victim.stdout is not None
            victim.stdout.readline()
            victim.kill()
        outcomes = Counter[str]()
        for client in clients:
            out, _ = client.communicate(timeout=TIMEOUT_S)
            if client not in victims:
                assert client.returncode == 0
                outcomes.update(json.loads(out.splitlines()[-1]))
    finally:
        for client in clients:
            client.kill()
            client.communicate()
    status = cluster.wait_idle(LEFT_S)
    assert [worker.free_blocks for worker in status.workers] == [worker.num_blocks for worker in status.workers]
    assert (status.queued, status.running) == (0, 0)
    deadline_s = time.monotonic() + LEFT_S
    while grown := {
        name: (before[name], held_by(each)) for name, each in service.items() if is_more(before[name], each)
    }:
        assert time.monotonic() < deadline_s, grown
        time.sleep(0.2)
    assert outcomes.pop(str(expected)) + outcomes["cancelled"] == STREAMS_EACH * (processes - killed), outcomes
    return outcomes


def is_more(before: tuple[int, int], process: psutil.Process) -> bool:
    """Whether a process holds more than before: a few files or threads may be a pool's, not one for each stream."""
    return any(now > then + 8 for then, now in zip(before, held_by(process), strict=True))


def service_of(folder: Path) -> dict[str, dict[str, object]]:
    return {
        "model": {"path": str(folder), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 400, "max_num_batched_tokens": 256, "max_num_seqs": 48},
        "router": {"max_queue": 1_024},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models"), "gqa")


def test_a_small_crowd(model: Path) -> None:
    with local_cluster(service_of(model)) as cluster:
        outcomes = run(cluster, greedy_tokens(model, PROMPT, TOKENS), processes=4, killed=1)
    assert outcomes["cancelled"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1_200)
def test_a_thousand_streams(model: Path) -> None:
    with local_cluster(service_of(model)) as cluster:
        before_mb: dict[str, int] = {}
        for number in range(3):  # what each one leaves would add up
            outcomes = run(cluster, greedy_tokens(model, PROMPT, TOKENS), processes=50, killed=1)
            memory_mb = {
                name: psutil.Process(popen.pid).memory_info().rss >> 20 for name, popen in cluster.processes.items()
            }
            log.info("crowd %d: %s, memory in MiB %s", number, dict(outcomes), memory_mb)
            grown_mb = {name: memory_mb[name] - before_mb[name] for name in before_mb}  # none at first: it warms up
            assert all(mb <= 24 for mb in grown_mb.values()), grown_mb
            before_mb = memory_mb


if __name__ == "__main__":
    print(json.dumps(asyncio.run(crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))  # noqa: T201
