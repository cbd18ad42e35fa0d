"""The Ray actor that holds a `GatewayThread`."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import time
from typing import TYPE_CHECKING, Any

import ray

from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, to_wire
from pdserve.version import VERSION
from runtime.logs import set_up_logging
from runtime.secret import ServiceSecret

if TYPE_CHECKING:
    from gateway.gateway import Gateway

RESTART_PAUSE_S = 1.0


@ray.remote
class GatewayActor:
    """Restarted by Ray when its process dies; workers then find it by their next heartbeat. Call `wait` first, and
    nothing else if that reports an error. ``secret`` is the service's in hexadecimal. ``cache_key``: see
    `gateway.gateway.Gateway`."""

    def __init__(
        self, config: PdserveConfig, registry_address: str, service: str, secret: str, cache_key: bytes
    ) -> None:
        from gateway.gateway_thread import GatewayThread  # the supervisor imports this module without the gateway

        set_up_logging(config.logging)
        self._error: PdserveError | None = None
        try:
            self._gateway = GatewayThread(
                config,
                registry_address,
                VERSION,
                ServiceSecret.from_hex(secret),
                service,
                cache_key,
                ray.get_runtime_context().was_current_actor_reconstructed,
            )
            self._gateway.start()
        except PdserveError as error:
            self._error = error
            if ray.get_runtime_context().was_current_actor_reconstructed:
                # `wait` was answered long ago, so let Ray restart the actor once more.
                logging.getLogger(__name__).error("the gateway could not be restarted: %s", error)
                time.sleep(RESTART_PAUSE_S)
                os._exit(1)

    def wait(self, serving_s: float | None = None) -> dict[str, Any]:
        """Empty if the gateway listens, and with ``serving_s`` once it can serve requests, for which it has so many
        seconds. Else ``{"error": (kind, message)}``."""
        try:
            if self._error is not None:
                raise self._error
            if serving_s is not None:
                self._gateway.run(lambda gateway: gateway.wait_serving(serving_s), serving_s)
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {}

    def call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        """The result of a method of `Gateway` (or of its directory: ``directory.retire``), which has so many
        seconds."""

        async def result(gateway: Gateway) -> Any:
            value = operator.attrgetter(method)(gateway)(*arguments)
            return await value if inspect.isawaitable(value) else value

        return self._gateway.run(result, timeout_s)

    def stop(self) -> None:
        """Close everything. Requests in progress end with UNAVAILABLE; have the gateway `drain` first."""
        self._gateway.stop(0.0)
