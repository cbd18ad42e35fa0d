"""Runs a `Gateway` with connections to real workers on a thread and event loop of its own, in a Ray actor or a
process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from checkpoints.source import resolve_model
from gateway.gateway import Gateway
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError
from runtime.plane_tls import plane_tls
from runtime.process import freeze_heap
from runtime.secret import ServiceSecret
from worker.client import WorkerClient

log = logging.getLogger(__name__)

START_TIMEOUT_S = 25.0
ANSWER_TIMEOUT_S = 5.0

T = TypeVar("T")


class GatewayThread:
    """A gateway of the service with this ``secret``, on a thread of this process. ``cache_key``, ``restarted``: see
    `Gateway`. ModelError if the model cannot be read, ConfigError if a file for TLS or tokens cannot be used. Methods
    raise LaunchError if the gateway does not answer."""

    def __init__(
        self,
        config: PdserveConfig,
        registry_address: str,
        version: str,
        secret: ServiceSecret,
        service: str = "",
        cache_key: bytes | None = None,
        restarted: bool = False,
    ) -> None:
        tls = plane_tls(config.cluster)
        self._gateway = Gateway(
            config,
            model=resolve_model(config.model.path, log.info, served=config.has_own_engines),
            connect=partial(WorkerClient.connect, secret=secret, tls=tls),
            secret=secret,
            tls=tls,
            registry_address=registry_address,
            version=version,
            service=service,
            cache_key=cache_key,
            restarted=restarted,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)

    def start(self) -> None:
        """Start the thread. Returns when both servers listen; LaunchError if a port is in use."""
        self._thread.start()
        self.run(Gateway.start, START_TIMEOUT_S)
        freeze_heap()

    def run(self, work: Callable[[Gateway], Coroutine[Any, Any, T]], timeout_s: float = 0.0) -> T:
        """What ``work`` with the gateway, on its thread, comes to within about ``timeout_s``."""
        future = asyncio.run_coroutine_threadsafe(work(self._gateway), self._loop)
        try:
            return future.result(timeout_s + ANSWER_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise LaunchError(f"the gateway did not answer within {timeout_s + ANSWER_TIMEOUT_S:.0f} s") from None

    def ask(self, question: Callable[[Gateway], T]) -> T:
        """The answer of the gateway to a question that needs no time."""

        async def answer(gateway: Gateway) -> T:
            return question(gateway)

        return self.run(answer)

    def stop(self, grace_s: float = 1.0) -> None:
        """See `Gateway.stop`."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(LaunchError):
            self.run(lambda gateway: gateway.stop(grace_s), grace_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_TIMEOUT_S)
