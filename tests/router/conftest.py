from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.core.clock import Clock
from pdserve.core.config import KVFailurePolicy, RouterConfig
from pdserve.core.request import Mode, Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.timeline import EventKind
from pdserve.core.worker import Links, Role, WorkerLoad
from router import retries
from router.deadline import Deadline
from router.registered_worker import RegisteredWorker
from router.registry import WorkerRegistry
from router.router import Router
from router.session import RoutingResult, Session
from router.view import WaitMode
from tests.fake_worker import FakeWorker, fake_info, fake_links
from tests.virtual_time import LoopClock, VirtualTimeLoop


def pytest_asyncio_loop_factories() -> Mapping[str, type[VirtualTimeLoop]]:
    """Sleeps here take no time, and say exactly what has happened by then."""
    return {"virtual_time": VirtualTimeLoop}


@dataclass
class Cluster:
    """A router over fake workers: p0, p1, ... prefill, d0, d1, ... decode, all connected."""

    router: Router
    registry: WorkerRegistry
    clock: Clock
    fleet: dict[str, FakeWorker] = field(default_factory=dict)

    def record(
        self,
        prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
        *,
        name: str = "r",
        max_tokens: int = 4,
        mode: Mode = Mode.PD,
        timeout_s: float = 5.0,
        salt: str = "",
        client: str = "",
        holder: str = "",
        priority: int = 0,
        prompt_logprobs: int | None = None,
    ) -> Session:
        """A request as the gateway hands it to the router."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs)
        request = Request(name, prompt, sampling, mode, salt=salt, priority=priority)
        record = Session(request, Deadline(self.clock.now() + timeout_s, self.clock), client=client, holder=holder)
        record.timeline.record(EventKind.RECEIVED, "gateway", self.clock.now())
        record.timeline.record(EventKind.TOKENIZED, "gateway", self.clock.now())
        return record

    async def served(self, record: Session, count: int = 0) -> RoutingResult:
        """The result of a request, once it has all its tokens (or ``count``): each is the one before plus one, and is
        delivered as it is recorded."""
        got: list[int] = []
        async with aclosing(self.router.generate(record)) as generation:
            async for token in generation:
                got.append(token.token_id)
                assert record.output_token_ids == got
        first = record.request.prompt_token_ids[-1] + 1
        assert got == list(range(first, first + (count or record.request.sampling.max_tokens)))
        return record.result

    async def watched(self, record: Session) -> tuple[list[float], RoutingResult]:
        """When each token came, in milliseconds from now, and the result. Tokens count as written at once."""
        begin_s, emitted = self.clock.now(), [EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED]
        times: list[float] = []
        async with aclosing(self.router.generate(record)) as generation:
            async for _ in generation:
                times.append((self.clock.now() - begin_s) * 1e3)
                if len(times) <= 2:
                    record.timeline.record(emitted[len(times) - 1], "gateway", self.clock.now())
        return times, record.result

    def worker(self, worker_id: str) -> RegisteredWorker:
        """A worker as the registry has it."""
        worker = self.registry.get(worker_id)
        assert worker is not None
        return worker

    def beat(self, worker_id: str, links: Links | None = None) -> None:
        """A heartbeat that changes nothing but the links, if they are given."""
        worker = self.worker(worker_id)
        links = {**worker.linked, **worker.failed} if links is None else links
        assert self.registry.heartbeat(worker_id, worker.load, worker.info, links)

    def aborted(self, worker_id: str) -> list[str]:
        """The requests that a worker was told to drop."""
        return [name.partition("#")[0] for name in self.fleet[worker_id].aborted]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once ``holds``; TimeoutError if it does not."""
        async with asyncio.timeout(10.0):
            while not holds():  # noqa: ASYNC110 - fakes tell nobody what they hold
                await asyncio.sleep(0.001)

    async def finish(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel requests."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_idle(self) -> None:
        """Everything given back: load accounts at zero, nothing held by any worker."""
        for worker in self.registry.workers:
            figures = (worker.outstanding_tokens, worker.outstanding_requests, worker.prompt_tokens)
            assert figures == (0, 0, 0), worker.worker_id
        assert all(not worker.held for worker in self.fleet.values())
        assert self.router.queued == self.router.running == 0


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCluster]:
    """Makes clusters, which have to be idle when the test is over."""
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)  # sleeping takes no time, but the tests count seconds

    made: list[Cluster] = []

    def make(
        prefill: int = 1,
        decode: int = 1,
        auto_mode: WaitMode = Mode.AUTO,
        on_kv_failure: KVFailurePolicy = "retry",
        **config: object,
    ) -> Cluster:
        clock = LoopClock()
        config = {"patience_s": 0.0, "heartbeat_timeout_s": 3.0, **config}
        router_config = RouterConfig.model_validate(config)
        registry = WorkerRegistry(clock, router_config)
        router = Router(registry, router_config, clock, auto_mode, on_kv_failure)
        cluster = Cluster(router, registry, clock)
        decoders = tuple(f"d{i}" for i in range(decode))
        for worker_id in (*(f"p{i}" for i in range(prefill)), *decoders):
            role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
            worker = FakeWorker(fake_info(worker_id, role), cluster.fleet, clock=clock)
            links = fake_links(*decoders) if role is Role.PREFILL else {}
            registry.add(worker, WorkerLoad(free_blocks=worker.info.num_blocks), links)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.check_idle()
