"""The Ray actor that holds a `GatewayThread`."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec
import ray

from gateway.scaling_report import ScalingReport
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, to_wire
from pdserve.core.worker import Role
from pdserve.version import VERSION
from runtime.logs import set_up_logging
from runtime.secret import ServiceSecret

RESTART_PAUSE_S = 1.0


@ray.remote
class GatewayActor:
    """Restarted by Ray when its process dies; workers then find it by their next heartbeat. Call `wait_started` first,
    and nothing else if that reports an error. ``secret`` is the service's in hexadecimal. ``cache_key``: see
    `gateway.gateway.Gateway`."""

    def __init__(
        self, config: dict[str, Any], registry_address: str, service: str, secret: str, cache_key: bytes
    ) -> None:
        from gateway.gateway_thread import GatewayThread  # the supervisor imports this module without the gateway

        set_up_logging(PdserveConfig.parse(config).logging)
        self._error: PdserveError | None = None
        try:
            self._gateway = GatewayThread(
                PdserveConfig.parse(config),
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
                # `wait_started` was answered long ago, so let Ray restart the actor once more.
                logging.getLogger(__name__).error("the gateway could not be restarted: %s", error)
                time.sleep(RESTART_PAUSE_S)
                os._exit(1)

    def wait_started(self) -> dict[str, Any]:
        """Empty if the gateway listens, or ``{"error": (kind, message)}``."""
        return {} if self._error is None else {"error": to_wire(self._error)}

    def wait_serving(self, timeout_s: float) -> dict[str, Any]:
        """Empty once requests can be served, or ``{"error": (kind, message)}`` with the reason why not."""
        try:
            self._gateway.run(lambda gateway: gateway.wait_serving(timeout_s), timeout_s)
        except PdserveError as error:
            return {"error": to_wire(error)}
        return {}

    def expect(self, members: dict[str, str], notes: list[str], version: int, scaling: dict[str, Any] | None) -> None:
        """Set the members of the service (worker ids and roles) of this ``version``, the ``notes`` shown with its
        status, and the fields of its `ScalingReport`. Calls may overtake each other: an earlier version than the last
        one has no effect."""
        report = None if scaling is None else ScalingReport(**scaling)
        roles = {worker_id: Role(role) for worker_id, role in members.items()}
        self._gateway.ask(lambda gateway: gateway.expect(roles, notes, version, report))

    def load(self) -> bytes:
        """A `GatewayLoad`, in msgpack."""
        return msgspec.msgpack.encode(self._gateway.ask(lambda gateway: gateway.load()))

    def wait_roles(self, worker_ids: list[str], timeout_s: float) -> list[str]:
        """Wait until these workers have the roles that were set, and the links that follow from them. Returns those
        that do not after ``timeout_s``."""
        return self._gateway.run(lambda gateway: gateway.directory.wait_roles(worker_ids, timeout_s), timeout_s)

    def retire(self, worker_ids: list[str], drain_s: float) -> None:
        """Send these workers no more requests; returns when they have finished those of all gateways, or after
        ``drain_s`` seconds."""
        self._gateway.run(lambda gateway: gateway.directory.retire(worker_ids, drain_s), drain_s)

    def dismiss(self, worker_ids: list[str]) -> None:
        """Remove these workers, which end."""
        self._gateway.run(lambda gateway: gateway.dismiss(worker_ids))

    def status(self) -> bytes:
        """The status for operators, a `GetStatusResponse`."""
        return self._gateway.ask(lambda gateway: gateway.status()).SerializeToString()

    def drain(self) -> int:
        """Refuse new requests; returns the number of requests in progress."""
        return self._gateway.ask(lambda gateway: gateway.drain())

    def stop(self) -> None:
        """Close everything. Requests in progress end with UNAVAILABLE; call `drain` first."""
        self._gateway.stop(0.0)
