"""A gateway before servers of another engine, as tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from checkpoints.source import resolve_model
from gateway.gateway import Gateway
from pdserve import AsyncClient
from pdserve.client.generation import Generation
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import WorkerInfo
from pdserve.pb import inference_pb2 as pb
from runtime.secret import ServiceSecret
from tests.external_engines.recorded_vllm import App, greedy, serving

PROMPT = list(range(5, 45))
EXPECTED = greedy(PROMPT, 8)

S = TypeVar("S")


async def never(info: WorkerInfo, epoch: str) -> None:
    raise AssertionError("no worker of pdserve's own is connected")


def gateway_before(prefill_url: str, decode_url: str, **settings: object) -> Gateway:
    """A gateway before two servers, which serve the model ``tiny``. ``settings`` are by dotted key."""
    overrides = {
        "cluster.prefill_urls": [prefill_url],
        "cluster.decode_urls": [decode_url],
        "gateway.port": 0,
        "gateway.http_port": 0,
        **settings,
    }
    return Gateway(
        PdserveConfig.load(None, overrides),
        model=resolve_model("tiny"),
        connect=never,  # type: ignore[arg-type]
        secret=ServiceSecret.new(),
    )


class Service(Generic[S]):
    """A gateway with a client, and the prefill and the decode server."""

    def __init__(self, gateway: Gateway, client: AsyncClient, prefill: S, decode: S) -> None:
        self.gateway, self.client, self.prefill, self.decode = gateway, client, prefill, decode

    async def ready(self) -> None:
        await self.gateway.wait_serving(20.0)

    async def generate(self, mode: str = "pd", timeout_s: float = 20.0, **asked: Any) -> Generation:
        await self.ready()
        asked = {"max_tokens": 8, "ignore_eos": True, "salt": "of a test", **asked}
        return await self.client.generate(PROMPT, mode=mode, timeout_s=timeout_s, **asked).result()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def notes(self) -> str:
        return " ".join(self.gateway.status().notes)

    def workers(self) -> dict[str, pb.WorkerStatus]:
        return {worker.worker_id: worker for worker in self.gateway.status().workers}


A = TypeVar("A", bound=App)


@asynccontextmanager
async def service_of(
    prefill: A, decode: A, *settings: tuple[str, object], **faults: object
) -> AsyncIterator[Service[A]]:
    """A gateway before two servers, 1P1D. ``faults`` are attributes of ``prefill`` or
    ``decode``."""
    for name, value in faults.items():
        role, _, attribute = name.partition("_")
        setattr({"prefill": prefill, "decode": decode}[role], attribute, value)
    async with serving(prefill, decode):
        beats = {"router.heartbeat_s": 0.05, "router.heartbeat_timeout_s": 5.0}
        gateway = gateway_before(prefill.url, decode.url, **beats, **dict(settings))
        await gateway.start()
        try:
            async with AsyncClient(f"127.0.0.1:{gateway.port}") as client:
                yield Service(gateway, client, prefill, decode)
        finally:
            await gateway.stop(0.0)
