"""A flood on a service of fake workers, with the real meter and controller beside the router: the controller has to
act, also while the readiness of workers flickers, and to say why while it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.callers import Callers
from gateway.gateway import LOOK_EVERY_S
from gateway.inference import Inference
from gateway.load_meter import LoadMeter
from gateway.scaling_report import GatewayLoad
from gateway.validation import Limits, Submission
from ops.scaling.loop import ScalingLoop
from pdserve.core.config import ScalingConfig, SloConfig
from pdserve.core.errors import PdserveError
from pdserve.core.request import Mode
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from tests.fake_worker import fake_links

if TYPE_CHECKING:
    from gateway.scaling_report import ScalingReport
    from tests.router.conftest import Cluster, MakeCluster

P, D = Role.PREFILL, Role.DECODE
FLOOD_S = 45.0


class FlippingService:
    """Carries out flips by the workers' next heartbeats."""

    is_changing = False

    def __init__(self, cluster: Cluster, meter: LoadMeter) -> None:
        self._cluster, self._meter = cluster, meter
        self.reports: list[ScalingReport] = []

    @property
    def counts(self) -> dict[Role, int]:
        return {role: sum(worker.role is role for worker in self._cluster.registry.workers) for role in Role}

    def loads(self) -> list[GatewayLoad | None]:
        return [self._meter.load()]

    def rescale(self, wanted: dict[Role, int], drain_s: float) -> list[str]:
        registry = self._cluster.registry
        flipped = [worker for worker in registry.workers if worker.role is D][-1]
        flipped.handle.info = replace(flipped.info, role=P)  # type: ignore[misc]
        left = fake_links(*(worker.worker_id for worker in registry.workers if worker.role is D))
        for worker in registry.workers:
            links = left if worker.handle.info.role is P else {}
            assert registry.heartbeat(worker.worker_id, worker.load, worker.handle.info, links)
        return [f"{flipped.worker_id} becomes a prefill worker"]

    def report_scaling(self, report: ScalingReport) -> None:
        self.reports.append(report)


async def test_a_flood_moves_workers(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=1, decode=3, prefill_backlog_tokens=1, max_queue=64)
    for worker in cluster.fleet.values():
        worker.delay_s = {"prefill": 0.3}
    meter = LoadMeter(SloConfig(ttft_ms=1000), cluster.clock, lambda: inference.running.values())
    callers = Callers(None, cluster.clock)
    limits = Limits(256, 256, 1000)
    inference = Inference(cluster.router, None, lambda: limits, callers, cluster.clock, 600.0, b"key", [meter])
    service = FlippingService(cluster, meter)
    config = ScalingConfig(controller="roles", ttft_ms=1000, interval_s=2, hold_s=10)
    controller = ScalingLoop(service, config, cluster.clock.now)
    served = 0

    async def request() -> None:
        nonlocal served
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        submission = Submission(prompt=[1, 2, 3], sampling=sampling, mode=Mode.PD)
        try:
            with inference.admission(callers.identify(""), None) as arrival:
                async for _ in inference.generate(submission, arrival):
                    pass
            served += 1
        except PdserveError:
            pass

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            meter.look(cluster.registry.view().workers, cluster.router.short_of)

    async def control() -> None:
        while True:
            await asyncio.sleep(config.interval_s)
            controller.look()

    async def flicker() -> None:
        """A heartbeat of each worker is late once in a while."""
        while True:
            for worker in cluster.registry.workers:
                cluster.registry.suspect(worker)
                await asyncio.sleep(0.25)
                cluster.beat(worker.worker_id)
                await asyncio.sleep(0.35)

    background = [asyncio.create_task(each()) for each in (look, control, flicker)]
    requests = []
    for _ in range(round(FLOOD_S * 20)):
        requests.append(asyncio.create_task(request()))
        await asyncio.sleep(1 / 20)
    for task in background:
        task.cancel()
    assert service.counts[P] >= 2, "it has acted"
    verdicts = [report.verdict for report in service.reports]
    assert any(verdict.startswith("figures of these workers are collected") for verdict in verdicts)
    assert any("first tokens met the objective" in report.reason for report in service.reports)
    await asyncio.gather(*background, *requests, return_exceptions=True)
    assert served > 100
