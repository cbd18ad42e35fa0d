"""Every process that can die or stop, in every state of a request. `make soak` goes through all; a few are in
`make test`.

A request ends with its complete answer, equal token by token to that of a run without faults, or with a clear error by
its deadline; then every block is free, and the next request succeeds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from benchmarks.request_states import BLOCKER, OUTPUTS, PROMPTS, SHAPE, State, held, is_free, settings, until
from pdserve import AsyncClient
from pdserve.client.status import ServiceStatus, ServiceWorker
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from tests.local_cluster import LocalCluster, local_cluster
from tests.random_models import save_random

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
GRACE_S = 10.0  # after its deadline, for a client on a busy machine
STOPPED_S = 1.0  # a gateway
RECOVERED_S = 90.0


@dataclass(frozen=True)
class Fault:
    """``signum`` to the process ``victim``: a gateway, or a worker or an engine of a role."""

    victim: str
    signum: signal.Signals
    state: State

    def __str__(self) -> str:
        return f"{self.signum.name} of {self.victim} while {self.state}"

    @property
    def role(self) -> str:
        return self.victim.partition(" ")[0]


VICTIMS = ("prefill worker", "prefill engine", "decode worker", "decode engine", "gateway")
ALL = [Fault(*each) for each in itertools.product(VICTIMS, (signal.SIGKILL, signal.SIGSTOP), State)]
FEW = [
    Fault("prefill worker", signal.SIGKILL, State.PREFILLING),
    Fault("prefill worker", signal.SIGSTOP, State.TRANSFERRING),
    Fault("decode worker", signal.SIGSTOP, State.DECODING),
    Fault("gateway", signal.SIGSTOP, State.PREFILLING),
]
"""What other tests do not have: see `tests.e2e.test_faults`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "model"
    save_random(folder, SHAPE, seed=3)
    with local_cluster(settings(str(folder)), prefill=2, decode=2) as cluster:
        yield cluster


class Matrix:
    """The faults on one cluster, one after the other."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._expected: dict[int, tuple[int, ...]] = {}
        self.outcomes: dict[str, str] = {}

    async def learn(self) -> None:
        """The answers without faults."""
        async with AsyncClient(self._cluster.target) as client:
            for prompt, outputs in [*((prompt, OUTPUTS) for prompt in PROMPTS.values()), (BLOCKER, 2)]:
                stream = client.generate(prompt, max_tokens=outputs, ignore_eos=True, mode="pd")
                self._expected[id(prompt)] = (await stream.result()).token_ids

    async def run(self, fault: Fault) -> None:
        """One fault and what follows."""
        cluster = self._cluster
        async with AsyncClient(cluster.target) as client, AsyncClient(cluster.operator) as operator:
            begin_s = time.monotonic()
            async with held(client, fault.state, timeout_s=TIMEOUT_S) as (request, blockers):
                status = await operator.status()
                resume = await self._strike(fault, status)
                ends = [request, *blockers]
                async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                    await asyncio.gather(*(each.reading for each in ends))
                await asyncio.to_thread(resume)
                for each, prompt in zip(ends, (PROMPTS[fault.state], *[BLOCKER] * len(blockers)), strict=True):
                    expected = self._expected[id(prompt)]
                    assert tuple(each.tokens) == expected[: len(each.tokens)], fault
                    assert each.error is not None or len(each.tokens) == len(expected), fault
            outcome = "answer" if request.error is None else type(request.error).__name__
            self.outcomes[str(fault)] = outcome
            answered_s = time.monotonic() - begin_s
            assert answered_s < cluster.config.transfer.lease_s, (fault, "is noticed by a lease that ends")
        await self._recovered(fault)
        log.info("%s: %s after %.1f s, well after %.1f s", fault, outcome, answered_s, time.monotonic() - begin_s)

    async def _strike(self, fault: Fault, status: ServiceStatus) -> Callable[[], object]:
        """Send the signal. Returns what brings the process back."""
        cluster = self._cluster
        if fault.role == "gateway":
            await asyncio.to_thread(cluster.kill, "gateway", fault.signum)
            if fault.signum == signal.SIGKILL:
                return cluster.start_gateway
            await asyncio.sleep(STOPPED_S)
            cluster.kill("gateway", signal.SIGCONT)
            return lambda: None
        victim = max((w for w in status.workers if w.role == fault.role), key=_use)
        if fault.victim.endswith("engine"):
            os.kill(victim.engine_pid, fault.signum)
            return lambda: None  # its worker sees to it
        await asyncio.to_thread(cluster.kill, victim.worker_id, fault.signum)
        if fault.signum == signal.SIGKILL:
            return lambda: cluster.start_worker(Role(victim.role), int(victim.worker_id[-1]))
        return lambda: cluster.kill(victim.worker_id, signal.SIGCONT)

    async def _recovered(self, fault: Fault) -> None:
        """All workers are ready and free, and the next request is served."""
        deadline_s = time.monotonic() + RECOVERED_S
        await asyncio.to_thread(self._cluster.wait_ready)
        async with AsyncClient(self._cluster.target) as client:
            while True:
                try:
                    status = await client.status()
                    if len(status.workers) == 4 and is_free(status) and all(w.state == "ready" for w in status.workers):
                        break
                except PdserveError:
                    status = None
                assert time.monotonic() < deadline_s, (fault, status)
                await asyncio.sleep(0.05)
            prompt = PROMPTS[State.DECODING]
            result = await client.generate(prompt, max_tokens=OUTPUTS, ignore_eos=True, mode="pd").result()
            assert result.token_ids == self._expected[id(prompt)], fault
            await until(client, is_free)


def _use(worker: ServiceWorker) -> tuple[int, int]:
    return worker.outstanding_tokens, worker.num_blocks - worker.free_blocks


async def test_a_few_faults(cluster: LocalCluster) -> None:
    matrix = Matrix(cluster)
    await matrix.learn()
    for fault in FEW:
        await matrix.run(fault)
    assert set(matrix.outcomes.values()) == {"answer"}, matrix.outcomes


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_every_fault_in_every_state(cluster: LocalCluster) -> None:
    matrix = Matrix(cluster)
    await matrix.learn()
    for fault in ALL:
        await matrix.run(fault)
    for name, outcome in matrix.outcomes.items():
        lost = name.startswith("SIGKILL of gateway")
        assert outcome in (("NotReady", "WorkerLost") if lost else ("answer",)), matrix.outcomes
