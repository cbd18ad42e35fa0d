"""A delay planted in a stage, between two hosts whose clocks differ by hours, is attributed to this stage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from experiments import hosts
from experiments.hosts import NamespaceDeployment
from pdserve import Client
from pdserve.core.timeline import UNATTRIBUTED, Figure
from tests.local_cluster import ROOT, undisturbed
from tests.planted import delays
from tests.planted.clocks import time_namespaces_problem
from worker.spec import WorkerSpec

pytestmark = pytest.mark.cluster

DELAY_MS = 100.0
CLOCKS_MS = 2.0  # the error of the measured offset between two hosts' clocks
REQUESTS = 10
AHEAD_S = {"prefill-0": 7_000, "decode-0": 50_000}
Stages = dict[Figure, dict[str, float]]


class FarHosts(NamespaceDeployment):
    """Hosts with clocks of their own, whose processes are those of `tests.planted`."""

    delays_ms: Mapping[str, float]

    def _spawn(self, name: str, inside: list[str], module: str, *arguments: str) -> None:
        if name in AHEAD_S:
            ahead = ["unshare", "--time", "--monotonic", str(AHEAD_S[name]), "--fork", "--kill-child=TERM"]
            inside = [*inside, *ahead]
        self._environment |= {**delays.environment(self.delays_ms), "PYTHONPATH": str(ROOT)}
        if module == "gateway":
            module = "tests.planted.gateway"
        else:
            spec = replace(WorkerSpec.from_wire(json.loads(arguments[0])), engine_module=delays.ENGINE_MODULE)
            arguments = (json.dumps(spec.to_wire()),)
            module = "tests.planted.worker"
        super()._spawn(name, inside, module, *arguments)


@contextmanager
def service(delays_ms: Mapping[str, float]) -> Iterator[Client]:
    with FarHosts(settings={"model.path": "tiny", "model.dtype": "float32", "engine.kv_memory_mb": 64}) as deployment:
        deployment.delays_ms = delays_ms
        with Client(deployment.provide({})) as client:
            yield client


def quickest_ms(client: Client) -> Stages:
    """The least time that any of some requests spent in each stage; the first ones are warm-up."""
    results = [
        client.generate([7] * 50, max_tokens=3, mode="pd", salt=str(number)).result() for number in range(REQUESTS + 3)
    ][3:]
    return {
        figure: {
            stage: min((result.breakdowns[figure].stages_ms[stage] for result in results), key=abs)
            for stage in results[0].breakdowns[figure].stages_ms
        }
        for figure in Figure
    }


@pytest.mark.parametrize("stage", sorted(delays.STAGES))
def test_a_stage_shows_its_own_delay_between_hosts(stage: str) -> None:
    """A busy machine adds to stages of some requests, never to all of one stage; it takes from none."""
    if problem := hosts.missing() or time_namespaces_problem():
        pytest.skip(problem)

    def check(planted: Stages) -> None:
        for figure in Figure:
            for name, length_ms in planted[figure].items():
                if name == stage:
                    assert length_ms >= DELAY_MS - CLOCKS_MS, figure
                else:
                    assert abs(length_ms) < DELAY_MS / 2, (figure, name)
            assert abs(planted[figure][UNATTRIBUTED]) <= CLOCKS_MS

    with service({stage: DELAY_MS}) as client:
        undisturbed(lambda: quickest_ms(client), check)
