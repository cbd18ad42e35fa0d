"""`ray up` with the project's cluster.yaml, `pdserve up`, requests from outside, `pdserve down`, `ray down`."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve import Client
from tests.cluster.environment import PROJECT
from tests.cluster.ray_cluster import RayCluster

pytestmark = pytest.mark.cluster

REQUESTS = 50
AT_ONCE = 8
LENGTHS = (1, 15, 16, 17, 80, 300, 700)
TOKENS = 8
ENDED_S = 60.0


def test_each_host_runs_its_own_copy(service: RayCluster) -> None:
    for host in (service.head, *service.workers):
        found = host.run("cd / && ~/pdserve/.venv/bin/python -c 'import pdserve; print(pdserve.__file__)'").stdout
        assert found.strip() == f"{PROJECT}/pdserve/__init__.py"


def test_tokens_and_bytes_between_hosts(service: RayCluster, timings: dict[str, float]) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(4000) for _ in range(LENGTHS[index % len(LENGTHS)])] for index in range(REQUESTS)]
    with Client(service.target) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        node_of = {worker.worker_id: worker.node for worker in client.status().workers}
        assert set(node_of.values()) <= {host.address for host in service.workers}

        began_s = time.monotonic()
        apart = list(
            pool.map(
                lambda prompt: client.generate(prompt, max_tokens=TOKENS, mode="pd", ignore_eos=True).result(), prompts
            )
        )
        timings[f"{REQUESTS} requests"] = time.monotonic() - began_s
        for prompt, result in zip(prompts, apart, strict=True):
            together = client.generate(prompt, max_tokens=TOKENS, mode="colocated", ignore_eos=True).result()
            assert result.token_ids == together.token_ids
            assert len(result.token_ids) == TOKENS
            assert result.kv_bytes == result.kv_bytes_expected > 0
            between_hosts = node_of[result.prefill_worker] != node_of[result.decode_worker]
            assert result.transport == ("tcp" if between_hosts else "shm")
        assert "tcp" in {result.transport for result in apart}

        deadline_s = time.monotonic() + 15  # heartbeats tell of free blocks with some delay
        while (status := client.status()).used_blocks:
            assert time.monotonic() < deadline_s, status
            time.sleep(0.2)
        assert all(not worker.kv_refused for worker in status.workers)


def test_kv_has_its_own_network(service: RayCluster) -> None:
    of_host = {host.address: host.kv_address for host in service.workers}
    for worker in service.workers_inside().values():
        assert worker["address"].startswith(f"{worker['node']}:")
        assert worker["kv_addresses"]["tcp"].startswith(f"{of_host[worker['node']]}:")


@pytest.mark.last
def test_down_leaves_nothing(service: RayCluster, timings: dict[str, float]) -> None:
    began_s = time.monotonic()
    service.pdserve("down")
    timings["pdserve down"] = time.monotonic() - began_s
    began_s = time.monotonic()
    service.down()
    timings["ray down"] = time.monotonic() - began_s
    while left := {host.name: host.processes() for host in service.hosts if host.processes()}:
        assert time.monotonic() < began_s + ENDED_S, left
        time.sleep(0.2)
    timings["ray down to the last process's end"] = time.monotonic() - began_s
    for host in service.hosts:
        assert host.listening() == {22}
        shared = host.run("ls -A /dev/shm; find /tmp -name 'pdserve*'").stdout  # /tmp/ray keeps Ray's logs
        assert not shared, f"{host.name}: {shared}"
        assert not list((host.home / ".local" / "state" / "pdserve").glob("*.json"))
