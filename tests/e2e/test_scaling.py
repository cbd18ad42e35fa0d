"""The controller of roles on a service of Ray: it moves workers to the role that is short, shows what it did, and costs
no request anything."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import AsyncClient
from pdserve.client.status import ServiceScaling
from tests.e2e.conftest import Cli, operator_of
from tests.local_cluster import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
WAIT_S = 120.0
# No first token can meet the objective of TTFT, every gap meets that of ITL. So a role is short as soon as requests
# wait for its workers, however fast this machine is.
CONFIG = """
engine: {block_size: 16, num_blocks: 256, max_num_seqs: 4, prefix_caching: false}
scaling: {controller: roles, ttft_ms: 1, itl_ms: 60000, interval_s: 0.5, hold_s: 2}
"""


class Load:
    """Clients that ask again and again. ``failures`` are errors and outputs that are too short."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._asked = 0
        self.answered = 0
        self.failures: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self, clients: int, prompt_tokens: int, outputs: int) -> AsyncIterator[None]:
        """So many of them, until the context ends; their last requests are completed."""
        ending = asyncio.Event()
        tasks = [asyncio.create_task(self._ask(prompt_tokens, outputs, ending)) for _ in range(clients)]
        try:
            yield
        finally:
            ending.set()
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    async def _ask(self, prompt_tokens: int, outputs: int, ending: asyncio.Event) -> None:
        while not ending.is_set():
            self._asked += 1
            prompt = [(self._asked + 31 * i) % 4000 + 1 for i in range(prompt_tokens)]
            try:
                stream = self._client.generate(prompt, max_tokens=outputs, ignore_eos=True, mode="pd", timeout_s=WAIT_S)
                done = await stream.result()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
                self.failures.append(repr(error))
                return
            self.answered += 1
            if (len(done.token_ids), done.attempts) != (outputs, 1):
                self.failures.append(f"{len(done.token_ids)} tokens, {done.attempts} attempts")


@pytest.mark.cluster
async def test_workers_follow_the_load_and_nothing_is_lost(cli: Cli, tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    config = tmp_path / "pdserve.yaml"
    config.write_text(f"gateway: {{http_port: {http_port}}}\n{CONFIG}")
    arguments = (
        "--model",
        "tiny",
        "--set",
        "model.dtype=float32",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--oversubscribe",
    )
    up = await asyncio.to_thread(cli.run, "up", "-c", str(config), *arguments, "--port", str(port), "--detach")
    assert up.returncode == 0, up.stderr
    target = f"127.0.0.1:{port}"
    operator = operator_of(Path(cli.env["XDG_STATE_HOME"]) / "pdserve" / f"{port}.json")
    try:
        async with AsyncClient(target) as client:
            load = Load(client)
            async with load.running(clients=4, prompt_tokens=600, outputs=2):
                scaling = await acted(client, 1)
            assert scaling.last_action in ("decode-0 becomes a prefill worker", "decode-1 becomes a prefill worker")
            assert "of first tokens met the objective of TTFT, and prefill workers are busy" in scaling.reason
            assert await counts(client) == (2, 1)
            async with load.running(clients=12, prompt_tokens=16, outputs=200):
                scaling = await acted(client, 2)
            assert scaling.last_action.endswith("becomes a decode worker")
            assert "requests wait for room on decode workers" in scaling.reason
            assert scaling.actions == {"flip prefill": 1, "flip decode": 1}
            assert await counts(client) == (1, 2)
            assert load.failures == []
            assert load.answered > 20
            for _ in range(100):
                status = await client.status()
                if status.used_blocks == 0:
                    break
                await asyncio.sleep(0.1)
            assert status.used_blocks == 0
            assert {w.worker_id: w.role for w in status.workers} == {
                "prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode",
            }  # fmt: skip
        shown = await asyncio.to_thread(cli.run, "status", "--target", target)
        assert "controller of roles: 2 actions, the last " in shown.stdout
        text = await asyncio.to_thread(metrics, http_port)
        assert 'pdserve_scaling_actions_total{action="flip prefill"} 1.0' in text
        assert 'pdserve_objective_total{figure="ttft",met="yes"} 0.0' in text
        assert 'pdserve_objective_total{figure="itl",met="no"} 0.0' in text
        async with AsyncClient(operator) as inside:
            assert (await inside.status()).scaling is not None
    finally:
        await asyncio.to_thread(cli.run, "down", "--target", target)


async def acted(client: AsyncClient, actions: int) -> ServiceScaling:
    """What the controller has done, once it has done so much."""
    status: Any = None
    async with asyncio.timeout(WAIT_S):
        while True:
            status = await client.status()
            if status.scaling is not None and sum(status.scaling.actions.values()) >= actions:
                return status.scaling  # type: ignore[no-any-return]
            await asyncio.sleep(0.1)


async def counts(client: AsyncClient) -> tuple[int, int]:
    """Prefill and decode workers."""
    workers = (await client.status()).workers
    prefill = sum(worker.role == "prefill" for worker in workers)
    return prefill, len(workers) - prefill


def metrics(http_port: int) -> str:
    """The metrics of the gateway."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")
