"""The Ray actor that holds a `GatewayThread`."""

from __future__ import annotations

import logging
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
    from gateway.scaling_report import GatewayLoad, ScalingReport
    from pdserve.core.worker import Role
    from pdserve.pb import inference_pb2 as pb

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

    def expect(self, roles: dict[str, Role], notes: list[str], version: int, scaling: ScalingReport | None) -> None:
        """See `Gateway.expect`. Of concurrent calls, the latest version counts."""
        self._gateway.ask(lambda gateway: gateway.expect(roles, notes, version, scaling))

    def load(self) -> GatewayLoad:
        """See `Gateway.load`."""
        return self._gateway.ask(lambda gateway: gateway.load())

    def wait_roles(self, worker_ids: list[str], timeout_s: float) -> list[str]:
        """See `WorkerDirectory.wait_roles`."""
        return self._gateway.run(lambda gateway: gateway.directory.wait_roles(worker_ids, timeout_s), timeout_s)

    def retire(self, worker_ids: list[str], drain_s: float) -> None:
        """See `WorkerDirectory.retire`."""
        self._gateway.run(lambda gateway: gateway.directory.retire(worker_ids, drain_s), drain_s)

    def dismiss(self, worker_ids: list[str]) -> None:
        """Remove these workers, which end."""
        self._gateway.run(lambda gateway: gateway.dismiss(worker_ids))

    def status(self) -> pb.GetStatusResponse:
        """The status for operators."""
        return self._gateway.ask(lambda gateway: gateway.status())

    def drain(self) -> int:
        """Refuse new requests; returns the number of requests in progress."""
        return self._gateway.ask(lambda gateway: gateway.drain())

    def stop(self) -> None:
        """Close everything. Requests in progress end with UNAVAILABLE; call `drain` first."""
        self._gateway.stop(0.0)
