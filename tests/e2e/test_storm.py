"""Storms: workers and engines die, or stop and go on, every few seconds while clients ask, cancel and are in a hurry.
`make soak`.

Whatever is delivered equals the fault-free run, bytes moved equal bytes predicted, almost every request is served
without its client trying again, and afterwards every block is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import save_random_model

log = logging.getLogger(__name__)

SEED = 11
STORM_S = float(os.environ.get("STORM_S", "180"))
CLIENTS = 16
TIMEOUT_S = 60.0
RESTART_S = 1.0  # as long as Ray takes to start an actor again
LENGTHS = (1, 15, 16, 17, 64, 130, 300)
OUTPUTS = 64


@dataclass
class Outcomes:
    """What became of the requests."""

    equal: int = 0
    wrong: int = 0
    transfers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def served(self) -> float:
        """The share of requests that were answered."""
        return self.equal / max(1, self.equal + self.wrong + self.errors.total())


class Storm:
    """Faults on a cluster of 2 prefill and 2 decode workers, at random but from a seed."""

    def __init__(self, cluster: LocalCluster, outcomes: Outcomes, draw: random.Random) -> None:
        self._cluster = cluster
        self._outcomes = outcomes
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: set[int] = set()

    async def cause_faults(self, kind: str) -> None:
        """Cause a fault every 2 to 5 s, until cancelled; then let everything go on."""
        try:
            async with AsyncClient(self._cluster.operator) as operator:
                while True:
                    await asyncio.sleep(self._draw.uniform(2.0, 5.0))
                    try:
                        status = await operator.status()
                    except PdserveError:
                        continue
                    ready = [worker for worker in status.workers if worker.state == "ready"]
                    if not ready:
                        continue
                    victim = self._draw.choice(ready)
                    part = self._draw.choice(("worker", "engine"))
                    pid = victim.pid if part == "worker" else victim.engine_pid
                    self._outcomes.faults[f"{kind} {part}"] += 1
                    if kind == "stop":
                        self._spawn(self._pause(pid, self._draw.uniform(1.0, 20.0)))
                    elif part == "worker":
                        self._spawn(self._kill_worker(victim.worker_id))
                    else:
                        _signal(pid, signal.SIGKILL)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for pid in self._stopped:
                _signal(pid, signal.SIGCONT)

    async def _pause(self, pid: int, seconds: float) -> None:
        if _signal(pid, signal.SIGSTOP):
            self._stopped.add(pid)
            await asyncio.sleep(seconds)
            _signal(pid, signal.SIGCONT)
            self._stopped.discard(pid)

    async def _kill_worker(self, worker_id: str) -> None:
        await asyncio.to_thread(self._cluster.kill, worker_id)
        role, _, index = worker_id.rpartition("-")
        await asyncio.shield(self._restart(Role(role), int(index)))

    async def _restart(self, role: Role, index: int) -> None:
        await asyncio.sleep(RESTART_S)
        self._cluster.start_worker(role, index)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _signal(pid: int, signum: signal.Signals) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # an engine that was taken for hung
        return False
    return True


async def storm(cluster: LocalCluster, kind: str, seconds: float) -> Outcomes:
    draw, outcomes = random.Random(SEED), Outcomes()
    async with AsyncClient(cluster.target) as client:
        prompts = [[draw.randrange(307) for _ in range(draw.choice(LENGTHS))] for _ in range(16)]
        runs = [await client.generate(prompt, max_tokens=OUTPUTS, ignore_eos=True).result() for prompt in prompts]
    known = [(prompt, run.token_ids) for prompt, run in zip(prompts, runs, strict=True)]
    until_s = time.monotonic() + seconds

    async def requests(draw: random.Random) -> None:
        async with AsyncClient(cluster.target) as client:
            while time.monotonic() < until_s:
                prompt, expected = draw.choice(known)
                wanted = draw.choice((1, 2, 3, *[OUTPUTS] * 5))
                fate = draw.choice(("finish",) * 8 + ("cancel", "hurry"))
                stream = client.generate(
                    prompt,
                    max_tokens=wanted,
                    ignore_eos=True,
                    mode=draw.choice(("pd", "pd", "colocated")),
                    timeout_s=0.05 if fate == "hurry" else TIMEOUT_S,
                    salt=str(draw.random()) if draw.random() < 0.7 else "",  # most find no block in any cache
                )
                got: list[int] = []
                try:
                    async for token in stream:
                        got.append(token.token_id)
                        if fate == "cancel":
                            stream.cancel()
                    result = await stream.result()
                except PdserveError as error:
                    outcomes.wrong += tuple(got) != expected[: len(got)]
                    if fate == "finish":
                        outcomes.errors[f"{type(error).__name__}: {error}"] += 1
                    continue
                right = result.token_ids == expected[:wanted] and result.kv_bytes == result.kv_bytes_expected
                outcomes.equal += right
                outcomes.wrong += not right
                outcomes.transfers += result.kv_bytes > 0

    faults = asyncio.create_task(Storm(cluster, outcomes, random.Random(SEED)).cause_faults(kind))
    try:
        await asyncio.gather(*(requests(random.Random(SEED + index)) for index in range(CLIENTS)))
    finally:
        faults.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await faults  # raises what ended it before
    return outcomes


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        ("kill", "shm"),
        ("kill", "tcp"),
        ("kill", "grpc_stream"),
        ("kill", "torch_dist"),
        ("stop", "shm"),
        ("stop", "tcp"),
    ],
)
def test_a_storm_costs_hardly_a_request(tmp_path: Path, kind: str, transport: str) -> None:
    settings = {
        "model": {"path": str(save_random_model(tmp_path, "gqa")), "dtype": "float32"},
        "engine": {"block_size": 16, "num_blocks": 512, "max_num_batched_tokens": 64},
        "transfer": {"transport": transport},
    }
    with local_cluster(settings, prefill=2, decode=2) as cluster:
        outcomes = asyncio.run(storm(cluster, kind, STORM_S))
        cluster.wait_idle()
    log.info("%s %s: %s", kind, transport, outcomes)
    assert outcomes.wrong == 0, outcomes
    assert outcomes.transfers > 0, outcomes
    assert outcomes.faults.total() >= STORM_S / 10, outcomes
    assert outcomes.served >= 0.99, outcomes
