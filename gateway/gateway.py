"""The front door as one object: public server, internal server, router, and what keeps the registry true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.clock import Clock, MonotonicClock
from core.config import PdserveConfig
from core.errors import LaunchError, NotReady, PdserveError
from core.request import Mode
from core.worker import Role
from gateway.draining import Draining
from gateway.inference_service import InferenceService
from gateway.registry_service import RegistryService
from gateway.status_report import StatusReport
from gateway.tokenizer import load_tokenizer
from gateway.worker_directory import Connect, WorkerDirectory
from pb import inference_pb2, inference_pb2_grpc, worker_pb2_grpc
from router.registry import WorkerRegistry
from router.router import Router
from router.waiting_line import RunMode

log = logging.getLogger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
DRAIN_S = 5.0  # how long running requests may go on once the gateway stops
STOPPING = "the service is being stopped; send the request to another one"

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # else a second gateway would silently share the port
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.max_receive_message_length", 64 * 2**20),
]


class Gateway:
    """``connect`` opens the control connection to a worker that has reported; ``registry_address`` is the internal
    ``host:port`` that workers report to (port 0 picks one). `ModelError` if the folder's tokenizer is broken."""

    def __init__(
        self,
        config: PdserveConfig,
        *,
        model_name: str,
        model_folder: Path | None,
        connect: Connect,
        registry_address: str = "127.0.0.1:0",
        version: str = "0+unknown",
        service: str = "",
        clock: Clock | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        delay_s = {str(stage): delay_ms / 1e3 for stage, delay_ms in config.testing.delay_ms.items()}
        self._config = config
        self._service = service
        self._registry_host, _, registry_port = registry_address.rpartition(":")
        self._registry_port = int(registry_port)
        self.registry = WorkerRegistry(clock, config.router.heartbeat_timeout_s, config.router.forget_s)
        both_roles = config.cluster.prefill and config.cluster.decode
        auto_mode: RunMode = Mode.PD if both_roles else Mode.COLOCATED
        self.router = Router(self.registry, config.router, clock, delay_s, auto_mode, config.transfer.on_kv_failure)
        self._directory = WorkerDirectory(self.registry, connect)
        self._report = report = StatusReport(
            self.registry, self.router, clock, config.model.name or model_name, version, lambda: self.problem is None
        )
        self._inference = InferenceService(
            self.router,
            load_tokenizer(model_folder),
            report.limits,
            report.message,
            clock,
            config.gateway.default_timeout_s,
            delay_s,
        )
        self._draining = Draining(f"/{SERVICE}/Generate")
        self._port = 0
        self._checks: Any = None
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._serving = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def port(self) -> int:
        """The public port."""
        return self._port

    @property
    def registry_address(self) -> str:
        """Where workers report to."""
        return f"{self._registry_host}:{self._registry_port}"

    @property
    def problem(self) -> PdserveError | None:
        """Why requests cannot be served now; None: they can."""
        if self._draining.error is not None:
            return self._draining.error
        return self.registry.unavailable(self.router.auto_mode)

    async def start(self) -> None:
        """Listen. `LaunchError` if a port is in use; nothing is left listening then."""
        config = self._config.gateway
        public = grpc.aio.server(interceptors=[self._draining], options=_OPTIONS)
        internal = grpc.aio.server(options=_OPTIONS)
        # The stubs know the threaded servicer only.
        checks = self._checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, public)
        health_pb2_grpc.add_HealthServicer_to_server(checks, public)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), public)
        worker_pb2_grpc.add_RegistryServicer_to_server(
            RegistryService(self._directory, uuid.uuid4().hex, self._service), internal
        )
        self._port = _listen(public, config.host, config.port, "gateway.port")
        self._registry_port = _listen(internal, self._registry_host, self._registry_port, "the workers' registry port")
        await internal.start()
        await public.start()
        self._servers = [public, internal]
        self.registry.subscribe(self._changed.set)
        self._tasks = [asyncio.create_task(self._tell_health(checks)), asyncio.create_task(self._watch_heartbeats())]

    async def wait_serving(self, timeout_s: float) -> None:
        """Return once requests can be served; after ``timeout_s`` raise what is in the way."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._serving.wait()
        except TimeoutError:
            raise self.problem or NotReady(f"not ready within {timeout_s:.0f} s") from None

    def expect(self, members: Mapping[str, Role]) -> None:
        """Who belongs to the service: what is not registered of them is shown as awaited."""
        self._report.expected = dict(members)

    async def retire(self, worker_ids: Collection[str], drain_s: float) -> None:
        """Give these workers nothing more; returns when they have finished and are forgotten, after ``drain_s`` at the
        latest (requests that are still there go on elsewhere)."""
        for worker_id in worker_ids:
            self._report.expected.pop(worker_id, None)
        await self._directory.retire(worker_ids, drain_s)

    def drain(self) -> int:
        """Refuse new requests (UNAVAILABLE) from now on. Returns how many are still in progress: they go on, with
        retries, until `stop`."""
        if self._draining.error is None:
            log.info("draining: %d requests are in progress", self._draining.in_progress)
            self._draining.error = NotReady(STOPPING)
            self._changed.set()
        return self._draining.in_progress

    async def serve_until_stopped(self) -> None:
        """Return once `stop` is done."""
        await self._stopped.wait()

    async def stop(self, grace_s: float = DRAIN_S) -> None:
        """Take no more requests, let running ones go on for ``grace_s``, then abort them and close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._servers:
            public, internal = self._servers
            await self._checks.enter_graceful_shutdown()
            await public.stop(grace_s)
            await internal.stop(None)
            self._servers = []
        await self._directory.close()
        self._stopped.set()

    async def _tell_health(self, checks: Any) -> None:
        while True:
            self._changed.clear()
            with _told_if_it_fails("telling the service's health"):
                await self._tell_if_changed(checks)
            await self._changed.wait()

    async def _tell_if_changed(self, checks: Any) -> None:
        serving = health_pb2.HealthCheckResponse
        ready = self.problem is None
        if ready == self._serving.is_set():
            return
        for name in ("", SERVICE):
            await checks.set(name, serving.SERVING if ready else serving.NOT_SERVING)
        if ready:
            self._serving.set()
        else:
            self._serving.clear()

    async def _watch_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(self._config.router.heartbeat_s, self._config.router.heartbeat_timeout_s / 4))
            with _told_if_it_fails("watching heartbeats"):
                self._directory.expire()


@contextlib.contextmanager
def _told_if_it_fails(doing: str) -> Iterator[None]:
    """Nobody awaits the gateway's own loops: a bug in one is logged, and its next round tries again."""
    try:
        yield
    except Exception:
        log.exception("%s failed in a way nobody foresaw", doing)


def _listen(server: grpc.aio.Server, host: str, port: int, what: str) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError:
        raise LaunchError(
            f"{what}: {port} is in use on {host} (or {host} is not this host's); choose another"
        ) from None
