"""A service on a host that other programs keep busy: nothing is killed, nothing is refused."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import AsyncClient, Client
from tests.e2e.conftest import Cli, operator_of
from tests.local_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(600)]

LOOPS = 8
BUSY_S = 60.0
CLIENTS = 3
PROMPT = tuple(range(5, 205))


@contextlib.contextmanager
def busy_loops() -> Iterator[None]:
    """Programs at the niceness of this one, each of which would use a whole core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def processes(operator: str) -> dict[str, tuple[int, int]]:
    """The processes of each worker and its engine."""
    with Client(operator) as client:
        return {worker.worker_id: (worker.pid, worker.engine_pid) for worker in client.status(60.0).workers}


def test_a_service_beside_busy_loops(cli: Cli) -> None:
    port = free_port()
    # In bfloat16, logits that are nearly equal may change their order with the size of the batch.
    up = cli.run("up", "--model", "tiny", "--set", "model.dtype=float32", "--port", str(port), "--detach")
    assert up.returncode == 0, up.stderr
    target = f"127.0.0.1:{port}"
    try:
        operator = operator_of(Path(cli.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json")
        before = processes(operator)
        with Client(target) as client:
            expected = client.generate(PROMPT, max_tokens=32, ignore_eos=True, mode="pd").result().token_ids

        async def ask(until_s: float) -> int:
            answered = 0
            async with AsyncClient(target) as client:
                while time.monotonic() < until_s:
                    stream = client.generate(PROMPT, max_tokens=32, ignore_eos=True, mode="pd", timeout_s=120)
                    answer = await stream.result()  # raises if it is refused
                    assert (answer.token_ids, answer.attempts) == (expected, 1)
                    answered += 1
            return answered

        async def ask_all() -> list[int]:
            until_s = time.monotonic() + BUSY_S
            return await asyncio.gather(*(ask(until_s) for _ in range(CLIENTS)))

        with busy_loops():
            answered = asyncio.run(ask_all())
        assert min(answered) > 0
        assert processes(operator) == before, "a worker or an engine was started again"
        with Client(target) as client:
            assert client.status().ready
    finally:
        down = cli.run("down", "--target", target)
    assert down.returncode == 0, down.stderr
