"""A decode node's power fails under load, and a prefill node is cut off: no request is lost, and no stream differs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from pdserve import Client
from pdserve.client.status import ServiceStatus
from tests.cluster.ray_cluster import RayCluster
from tests.load import Load

pytestmark = pytest.mark.cluster

LENGTHS = (20, 90, 300, 900)
BEFORE_S = 6.0
FORGET_S = 3.0
"""The dead are forgotten sooner than this (`RayCluster.up_service`)."""
REPLACED_S = 120.0
IDLE_S = 15.0


def until(cluster: RayCluster, holds: Callable[[ServiceStatus], bool], timeout_s: float) -> None:
    with Client(cluster.target) as client:
        deadline_s = time.monotonic() + timeout_s
        while not holds(status := client.status()):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.2)


@pytest.mark.parametrize(("role", "fate"), [("decode", "power failed"), ("prefill", "cut off")])
def test_a_node_is_lost(service: RayCluster, timings: dict[str, float], role: str, fate: str) -> None:
    with Client(service.target) as client:
        node = next(worker.node for worker in client.status().workers if worker.role == role)
    victim = next(host for host in service.workers if host.address == node)
    draw = random.Random(7)
    prompts = [[draw.randrange(4000) for _ in range(length)] for length in LENGTHS]
    with Load(service.target, prompts, clients=24, max_tokens=64, mode="pd") as load:
        time.sleep(BEFORE_S)
        began_s = time.monotonic()
        (victim.kill if fate == "power failed" else victim.partition)()
        until(
            service,
            lambda s: [w.state for w in s.workers] == ["ready"] * 4 and node not in {w.node for w in s.workers},
            REPLACED_S,
        )
        timings[f"{role} node {fate}: until its workers serve elsewhere"] = time.monotonic() - began_s
        if fate == "cut off":
            replaced = {worker["pid"] for worker in service.workers_inside().values()}
            time.sleep(FORGET_S)
            # What ran on it believes itself alive: it must end, rather than take its old name back.
            victim.heal()
            time.sleep(BEFORE_S)
            assert {worker["pid"] for worker in service.workers_inside().values()} == replaced
    assert load.check() > 1, "no request was on the worker: nothing has been tested"
    until(service, lambda status: not status.used_blocks, IDLE_S)
