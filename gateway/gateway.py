"""The gateway: the public gRPC and HTTP servers, the internal gRPC server, the router, and the maintenance of the
worker registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Metric

from checkpoints.source import ModelSource, tokenizer_note
from contract.control import MAX_BEAT_BYTES
from contract.scaling import GatewayLoad, ScalingReport
from external_engines.directory import EngineDirectory, ServerAt, named
from external_engines.server import adapters_of
from gateway.chat_template import load_chat_template
from gateway.grpc_api.connection_guard import ConnectionGuard
from gateway.grpc_api.inference_servicer import SERVICE, InferenceServicer
from gateway.grpc_api.interceptor import Interceptor
from gateway.grpc_api.server_options import server_options
from gateway.http_api.app import make_app
from gateway.http_api.bodies import Bodies
from gateway.http_api.exchange import ServedModel
from gateway.http_api.server import HttpServer
from gateway.inference import STOPPING, Inference, Observer
from gateway.live import LastRequests, live_view
from gateway.load_meter import LOOK_EVERY_S, LoadMeter
from gateway.metrics import Metrics, scaling_metrics, service_metrics
from gateway.security import security_of
from gateway.status_report import StatusReport
from gateway.tokenizer import load_tokenizer
from gateway.validation import max_message_bytes
from gateway.worker_directory import Connect, WorkerDirectory
from pdserve.core.address import join_address
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError, LaunchError, NotReady, PdserveError
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from pdserve.pb import inference_pb2 as pb
from router.registry import WorkerRegistry
from router.router import Router
from router.view import WaitMode
from runtime.awake_clock import RunningAwakeClock
from runtime.grpc_tls import server_credentials
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.stream_proof import StreamListener
from worker.authentication import REGISTRY, proven_server

if TYPE_CHECKING:
    from gateway.tracing import Tracing

log = logging.getLogger(__name__)

DRAIN_S = 5.0  # time for running requests when the gateway stops


class Gateway:
    """``connect`` opens the control connection to a worker that has registered. Only workers that know ``secret`` can
    register, over ``tls`` if the worker plane has it. ``registry_address`` is the internal ``host:port`` that workers
    report to (port 0: any). ``cache_key`` separates the cached KV of callers; by
    default it is made of the secret, so that a service with another secret finds none of the KV on disk.
    ``restarted``: the service ran before this gateway, so requests wait for workers to report instead of being refused.
    `ModelError` if the folder's tokenizer is broken, `ConfigError` if a file for TLS or tokens is, or the service would
    be reachable unprotected."""

    def __init__(
        self,
        config: PdserveConfig,
        *,
        model: ModelSource,
        connect: Connect,
        secret: ServiceSecret,
        tls: PlaneTls | None = None,
        registry_address: str = "127.0.0.1:0",
        version: str = "0+unknown",
        service: str = "",
        cache_key: bytes | None = None,
        restarted: bool = False,
    ) -> None:
        clock = self._clock = MonotonicClock()
        self._config = config
        self._secret = secret
        self._security = security = security_of(config.gateway, clock)
        self._tls = tls
        self._registry_host, _, registry_port = registry_address.rpartition(":")
        self._registry_port = int(registry_port)
        # Heartbeat timeouts advance only while this loop runs and can read heartbeats.
        self.registry = WorkerRegistry(RunningAwakeClock(), config.router, config.gateway.replicas)
        both_roles = config.cluster.num_prefill and config.cluster.num_decode
        if restarted:
            self.registry.expect_workers(list(Mode) if both_roles else [Mode.COLOCATED])
        auto_mode: WaitMode = Mode.AUTO if both_roles else Mode.COLOCATED
        self.router = Router(self.registry, config.router, clock, auto_mode, config.transfer.on_kv_failure)
        self.directory = WorkerDirectory(self.registry, connect, service)
        pause_s = max(config.router.heartbeat_s, config.router.heartbeat_timeout_s / 4)
        adapters = adapters_of(config.worker.connector)
        self._engines = EngineDirectory(self.registry, model, config.model.dtype, pause_s, clock, adapters)
        # After a restart they may be others, which `expect` says.
        self._engines_at_start = {} if restarted else named(config.cluster.urls, {})
        note = tokenizer_note(model.folder)
        if note:
            log.warning("%s", note)
        self._model = config.model.name or model.name
        self._version = version
        self._chat_template = load_chat_template(model.folder, config.model.chat_template)
        self._report = report = StatusReport(
            self.registry,
            self.router,
            clock,
            self._model,
            version,
            lambda: self.problem is None,
            model.shape.dtype,
            config.public_settings,
            [note] if note else [],
            security.callers.problem,
            self._engines,
        )
        report.expected = {worker_id: server.role for worker_id, server in self._engines_at_start.items()}
        tokenizer = load_tokenizer(model.folder)
        self._context_length = config.engine.max_model_len or model.shape.max_position_embeddings
        self._max_message_bytes = max_message_bytes(self._context_length, tokenizer)
        self._metrics = Metrics(self._state)
        self._last = LastRequests()
        self._meter = LoadMeter(config.objectives, clock, lambda: self._inference.running.values())
        observers: list[Observer] = [self._metrics, self._last]
        if config.objectives.ttft_ms or config.objectives.itl_ms:  # without one there is nothing to compare with
            observers.append(self._meter)
        self._tracing: Tracing | None = None
        if config.gateway.otlp_endpoint is not None:
            self._tracing = _tracing_to(config.gateway.otlp_endpoint, clock, version)
            observers.append(self._tracing)
        self._inference = Inference(
            self.router,
            tokenizer,
            report.limits,
            security.callers,
            clock,
            config.gateway.default_timeout_s,
            cache_key or secret.cache_key,
            observers,
        )
        self._port = 0
        self._http: HttpServer | None = None
        self._checks: Any = None
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._serving = asyncio.Event()

    @property
    def port(self) -> int:
        """The public port."""
        return self._port

    @property
    def http_port(self) -> int:
        """The port of the HTTP server; 0 without one."""
        return 0 if self._http is None else self._http.port

    @property
    def registry_address(self) -> str:
        """The address that workers report to."""
        return f"{self._registry_host}:{self._registry_port}"

    @property
    def problem(self) -> PdserveError | None:
        """The reason why requests cannot be served now; None if they can."""
        if self._inference.draining is not None:
            return self._inference.draining
        mode = self.router.auto_mode
        if mode is Mode.AUTO and not self.registry.was_available(Mode.PD):
            mode = Mode.PD  # a starting service is ready when it is complete
        return self.registry.unavailable(mode)

    async def start(self) -> None:
        """Listen on all ports. `LaunchError` if one is in use; nothing is left listening then."""
        config = self._config.gateway
        guard = ConnectionGuard(self._max_message_bytes, self._clock)
        interceptor = Interceptor(self._inference.identify, guard)
        public = grpc.aio.server(options=server_options(self._max_message_bytes), interceptors=[interceptor])
        proofs = StreamListener(self._secret, REGISTRY.purpose, "")
        internal = proven_server(REGISTRY, proofs, self.directory.serve, MAX_BEAT_BYTES)
        # The type stubs know the threaded servicer only.
        checks = self._checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, public)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), public)
        credentials = self._security.tls
        self._port = _listen(public, config.host, config.port, "gateway.port", credentials)
        guard.port = self._port
        InferenceServicer(self._inference, self._report.public, guard).add_to(public)
        self._registry_port = _listen(
            internal,
            self._registry_host,
            self._registry_port,
            "the workers' registry port",
            None if self._tls is None else server_credentials(self._tls),
        )
        proofs.address = self.registry_address
        self._http = self._make_http()
        await internal.start()
        await public.start()
        self._servers = [public, internal]
        if self._http is not None:
            await self._http.start()
        self._engines.set(self._engines_at_start)
        self.registry.subscribe_workers(self._changed.set)
        heartbeats_s = min(self._config.router.heartbeat_s, self._config.router.heartbeat_timeout_s / 4)
        self._tasks = [
            asyncio.create_task(self._maintain_health(checks)),
            _repeating("watching heartbeats", lambda: heartbeats_s, self.directory.expire),
            _repeating("looking at the connections", lambda: guard.pause_s, guard.look),
        ]
        if self._config.scaling.controller != "off":
            look = _repeating("looking at the workers' load", lambda: LOOK_EVERY_S, self._look_at_load)
            self._tasks.append(look)

    def _look_at_load(self) -> None:
        self._meter.look(self.registry.view().workers, self.router.short_of)

    async def wait_serving(self, timeout_s: float) -> None:
        """Return once requests can be served. After ``timeout_s``, raise the reason why not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._serving.wait()
        except TimeoutError:
            raise self.problem or NotReady(f"not ready within {timeout_s:.0f} s") from None

    def expect(
        self,
        members: Mapping[str, Role],
        notes: Sequence[str] = (),
        version: int = 0,
        scaling: ScalingReport | None = None,
        servers: Mapping[str, ServerAt] | None = None,
    ) -> None:
        """Set the members of the service and the roles that they should have, unless a later ``version`` of them is
        known. Those that have not registered are shown as awaited. ``notes`` are shown with the status, and so is
        ``scaling``. ``servers``: the members that are servers of other engines (None: as before)."""
        if self.directory.expect(members, version):
            if servers is not None:
                self._engines.set(servers)
            self._report.expected = dict(members)
            self._report.notes = tuple(notes)
            self._report.scaling = scaling

    async def dismiss(self, worker_ids: Collection[str]) -> None:
        """Remove these workers, which end. Remaining requests continue on other workers."""
        for worker_id in worker_ids:
            self._report.expected.pop(worker_id, None)
        await self.directory.dismiss(worker_ids)

    def status(self) -> pb.GetStatusResponse:
        """The status for operators, with the addresses and processes of the service."""
        return self._report.message()

    def load(self) -> GatewayLoad:
        """What a controller of the workers needs to know."""
        return self._meter.load(self.registry.ready())

    def drain(self) -> int:
        """Refuse new requests (UNAVAILABLE). Returns the number of requests in progress, which go on, with retries,
        until `stop`."""
        if self._inference.draining is None:
            log.info("draining: %d requests are in progress", self._inference.in_progress)
            self._inference.draining = NotReady(STOPPING)
            self._changed.set()
        return self._inference.in_progress

    async def stop(self, grace_s: float = DRAIN_S) -> None:
        """Refuse new requests, let running ones go on for ``grace_s``, then abort them and close everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._servers:
            public, internal = self._servers
            await self._checks.enter_graceful_shutdown()
            http = self._http.stop(grace_s) if self._http is not None else asyncio.sleep(0)
            await asyncio.gather(public.stop(grace_s), http)
            await internal.stop(None)
            self._servers = []
        await self._engines.close()
        await self.directory.close()
        if self._tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._tracing.close)

    def _make_http(self) -> HttpServer | None:
        config = self._config.gateway
        if not config.served_http_port:
            return None
        bodies = Bodies(self._context_length, self._max_message_bytes)
        served = ServedModel(self._inference, self._model, self._chat_template, bodies)
        app = make_app(
            served,
            self._version,
            lambda: self.problem,
            self._metrics.text,
            lambda caller: live_view(self._inference, self._report.public, self._last, caller),
            self._security.host_names,
            config.report,
        )
        return HttpServer(app, config, served.over)

    def _state(self) -> Iterator[Metric]:
        about = {"version": self._version, "model": self._model}
        workers, router = self.registry.workers, self.router
        yield from service_metrics(
            workers, self.registry.restarts, router.queued, router.running, self.problem is None, about
        )
        yield from scaling_metrics(self._meter.load(), self._report.scaling)

    async def _maintain_health(self, checks: Any) -> None:
        while True:
            self._changed.clear()
            with _logging_failures("updating the service's health"):
                ready = self.problem is None
                if ready != self._serving.is_set():
                    serving = health_pb2.HealthCheckResponse.SERVING
                    for name in ("", SERVICE):
                        await checks.set(name, serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING)
                    (self._serving.set if ready else self._serving.clear)()
            await self._changed.wait()


@contextlib.contextmanager
def _logging_failures(doing: str) -> Iterator[None]:
    """Log an unexpected error of a maintenance loop, so that its next round can try again."""
    try:
        yield
    except Exception:
        log.exception("unexpected error while %s", doing)


def _repeating(doing: str, pause_s: Callable[[], float], step: Callable[[], None]) -> asyncio.Task[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_s())
            with _logging_failures(doing):
                step()

    return asyncio.create_task(repeat())


def _tracing_to(endpoint: str, clock: Clock, version: str) -> Tracing:
    """Tracing to a collector. `ConfigError` where OpenTelemetry is not installed."""
    try:
        from gateway.tracing import tracing_to
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"gateway.otlp_endpoint: {error.name} is missing; install pdserve with the extra otel"
        ) from None
    return tracing_to(endpoint, clock, version)


def _listen(
    server: grpc.aio.Server, host: str, port: int, what: str, credentials: grpc.ServerCredentials | None
) -> int:
    address = join_address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise LaunchError(
            f"{what}: {port} is in use on {host} (or {host} is not this host's); choose another"
        ) from None
