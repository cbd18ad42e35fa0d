"""`python -m tests.planted.gateway CONFIG_JSON REGISTRY_ADDRESS`: a gateway with planted delays.

``gateway`` passes before a request's prompt is read, ``route`` before a request joins the line for a worker, and
``dispatch`` before it leaves for its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gateway.gateway_thread
from contract.control import WorkerHandle
from gateway.__main__ import main
from gateway.gateway import Gateway
from gateway.worker_directory import Connect
from pdserve.core.config import PdserveConfig
from pdserve.core.worker import WorkerInfo
from router.router import Router
from tests.planted.delays import planted_delays_s


class DelayedGateway(Gateway):
    """A gateway with the delays of this process."""

    def __init__(self, config: PdserveConfig, *, connect: Connect, **settings: Any) -> None:
        delay_s = planted_delays_s()

        async def connect_late(info: WorkerInfo, gateway_epoch: str) -> WorkerHandle:
            handle = await connect(info, gateway_epoch)
            delay_dispatch(handle, delay_s.get("dispatch", 0.0))
            return handle

        super().__init__(config, connect=connect_late, **settings)
        delay_gateway(self, delay_s)


def delay_gateway(gateway: Gateway, delay_s: Mapping[str, float]) -> None:
    """Plant the delays ``gateway`` and ``route`` in a gateway."""
    _delay(gateway._inference, "_read", delay_s.get("gateway", 0.0))
    delay_route(gateway.router, delay_s.get("route", 0.0))


def delay_route(router: Router, delay_s: float) -> None:
    """Have requests, retries as well, join the line for a worker so much later."""
    _delay(router._line, "wait", delay_s)


def delay_dispatch(handle: WorkerHandle, delay_s: float) -> None:
    """Have requests leave for this worker so much later."""
    for name in ("push", "receive", "run"):
        setattr(handle, name, _late(getattr(handle, name), delay_s))


def _delay(owner: object, method: str, delay_s: float) -> None:
    on_time: Callable[..., Awaitable[object]] = getattr(owner, method)

    async def late(*arguments: object) -> object:
        await asyncio.sleep(delay_s)
        return await on_time(*arguments)

    setattr(owner, method, late)


def _late(on_time: Callable[..., None], delay_s: float) -> Callable[..., None]:
    def late(*arguments: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, on_time, *arguments)

    return late


if __name__ == "__main__":
    setattr(gateway.gateway_thread, "Gateway", DelayedGateway)  # noqa: B010 - an imported name
    main()
