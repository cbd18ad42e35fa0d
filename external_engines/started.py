"""A worker whose engine is a server that it starts: a worker of the service like pdserve's own to gateways, which gives
the requests to the server. Other users of the host cannot call the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from checkpoints.source import resolve_model
from contract import control
from external_engines import sglang_server, vllm_server
from external_engines.launch import Launcher, Place, free_port
from external_engines.process import ServerProcess
from external_engines.server import Server
from external_engines.worker import EngineWorker
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import InvalidRequest, LaunchError, NotReady, PdserveError, WorkerLost
from pdserve.core.handoff import KVPeer, PeerLink
from pdserve.core.worker import TokenOutput, WorkerInfo, WorkerLoad
from runtime.awake_clock import awake_clock
from runtime.plane_tls import plane_tls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread
from worker.addresses import resolve_interface
from worker.heartbeat import Heartbeat, registry_wire
from worker.membership import Membership
from worker.server import ControlServer, Outbox
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

LAUNCHERS: Mapping[str, Launcher] = {"vllm": vllm_server.launch, "sglang": sglang_server.launch}
"""By `pdserve.core.config.WorkerConfig.engine`."""
RESTART_PAUSE_S = 1.0
STOP_TIMEOUT_S = 8.0
SILENT_S = 30.0
"""Limit: a server of another engine that does not answer. Then: its worker kills it and starts another one."""
LOOK_EVERY_S = 0.5


@dataclass(slots=True, eq=False)
class _Served:
    """A request on the server, and the sink of its outputs. ``ended`` is called at its end."""

    work: control.Work
    outbox: Outbox
    ended: Callable[[], object]
    num_outputs: int = 0

    def output(self, output: TokenOutput) -> None:
        """Send an output to the gateway."""
        self.num_outputs += output.token_id is not None
        self.outbox.output(self.work.request.attempt_id, output)
        if output.finish_reason is not None or isinstance(self.work, control.Push):
            self.ended()

    def failed(self, error: PdserveError) -> None:
        """Send an error to the gateway."""
        self.outbox.error(self.work.request.attempt_id, error)
        self.ended()

    def outstanding(self) -> tuple[int, int]:
        """Tokens that are still to be computed, and how many of them are of its prompt."""
        request, receives = self.work.request, isinstance(self.work, control.Receive)
        prompt_tokens = 0 if receives or self.num_outputs else request.num_tokens
        outputs = 1 if isinstance(self.work, control.Push) else request.max_tokens - receives
        return prompt_tokens + max(0, outputs - self.num_outputs), prompt_tokens


class StartedServer:
    """One worker of the service with this ``secret``, whose server is started anew when it ends or falls silent.

    ``started`` has the worker's info once the first server is ready, or the error that kept it from starting. Its role
    says what the gateways give it, and they change it by their answers to heartbeats, if every server can do both (see
    `ops.launch.members.Members.may_flip`)."""

    def __init__(self, spec: WorkerSpec, secret: ServiceSecret, clock: Clock | None = None) -> None:
        self.spec = spec
        self.clock = clock or MonotonicClock()
        self.notes: list[str] = []
        self.started: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._membership = Membership(spec.worker_id, spec.role)
        self._secret = secret
        self._life = secrets.token_hex(16)
        self._restarts = 0
        self._info: WorkerInfo | None = None
        self._server: Server | None = None  # while there is one that is ready
        self._requests: dict[str, _Served] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._peers: dict[str, tuple[KVPeer, ...]] = {}  # by registry
        self._control = ControlServer(self, spec.worker_id, self.clock, secret)
        heartbeat_s = spec.config.router.heartbeat_s
        self._heartbeats = [
            Heartbeat(self, spec.worker_id, address, heartbeat_s) for address in spec.registry_addresses
        ]

    async def run(self) -> None:
        """Serve until cancelled. Raises the error that kept the first server from starting; later failures are tried
        again. WorkerLost if the gateway has superseded this worker."""
        spec = self.spec
        folder = Path(tempfile.mkdtemp(prefix="pdserve-server-"))  # of this user alone
        try:
            tls = plane_tls(spec.config.cluster)
            await self._control.start(spec.host, spec.port, tls)
            while True:
                try:
                    await self._serve_one(folder / str(self._restarts), lambda at: registry_wire(at, self._secret, tls))
                except PdserveError as error:
                    if not self.started.done() or self._membership.superseded.done():
                        raise
                    log.warning("%s: %s", spec.worker_id, error)
                self._restarts += 1
                await asyncio.sleep(RESTART_PAUSE_S)
        except Exception as error:
            if not self.started.done():
                failure = error if isinstance(error, PdserveError) else LaunchError(f"{type(error).__name__}: {error}")
                self.started.set_exception(failure)
            raise
        finally:
            for heartbeat in self._heartbeats:
                await heartbeat.stop()
            await self._control.stop()
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve_one(self, folder: Path, wire: Callable[[str], control.Wire]) -> None:
        """Start a server with this ``folder``, and serve until it has ended or is silent, or this worker is superseded.
        PdserveError if it does not start."""
        spec = self.spec
        source = await in_thread("model", lambda: resolve_model(spec.config.model.path, served=False))
        interface = await in_thread(
            "kv-interface", lambda: resolve_interface(spec.config.transfer.interface, spec.host)
        )
        port = spec.kv_port or free_port(interface.address)
        os.mkdir(folder, 0o700)
        launch = LAUNCHERS[self._kind](spec, source, Place(folder, interface.address, port))
        process = await ServerProcess.start(launch.command, launch.environment, spec.cores)
        http = launch.client()
        role, dtype = self._membership.role, spec.config.model.dtype
        server = Server(spec.worker_id, role, http, source, dtype, self.clock, (launch.adapter,))
        try:
            await self._wait_ready(server, process)
            if not self.started.done():
                for heartbeat in self._heartbeats:
                    heartbeat.start(wire(heartbeat.registry_address))
            self._announce(server, process)
            self.request_heartbeat()
            await self._watch(server, process)
        finally:
            self._server = None
            self.request_heartbeat()  # the gateways must not send more requests
            if server.worker is not None:
                await server.worker.aclose()
            await http.aclose()
            await process.stop(STOP_TIMEOUT_S)

    @property
    def _kind(self) -> str:
        return self.spec.config.worker.engine

    async def _wait_ready(self, server: Server, process: ServerProcess) -> None:
        limit_s = self.spec.config.cluster.start_limit_s(self.spec.device)
        deadline_s = self.clock.now() + limit_s
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if await server.look():
                    return
            await asyncio.wait([process.ended], timeout=LOOK_EVERY_S)
            if process.ended.done():
                raise LaunchError(
                    f"worker {self.spec.worker_id}: {self._kind} ended while it started (exit status "
                    f"{process.ended.result()}); see its log, and worker.command and worker.arguments"
                )
            if self.clock.now() > deadline_s:
                raise LaunchError(f"worker {self.spec.worker_id}: {self._kind} was not ready within {limit_s:.0f} s")

    def _announce(self, server: Server, process: ServerProcess) -> None:
        spec, info = self.spec, server.begin().info
        self._server = server
        self._info = replace(
            info,
            role=self._membership.role,
            control_address=self._control.address,
            node=spec.node,
            pid=os.getpid(),
            engine_pid=process.pid,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            cores=",".join(map(str, spec.cores)),
            engine_restarts=self._restarts,
            clock_id=clock_id(),
            life=self._life,
            service=spec.service,
        )
        log.info("%s: %s is ready (process %d)", spec.worker_id, dict(info.engine), process.pid)
        if not self.started.done():
            self.started.set_result(self._info)

    async def _watch(self, server: Server, process: ServerProcess) -> None:
        """Look at the server until it has ended, is silent, or is no longer wanted."""
        router = self.spec.config.router
        pause_s = max(router.heartbeat_s, router.heartbeat_timeout_s / 4)
        clock = awake_clock()
        answered_s = clock.now()
        while True:
            await asyncio.wait(
                (process.ended, self._membership.superseded), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._membership.superseded.done():
                self._membership.superseded.result()
            if process.ended.done():
                raise WorkerLost(f"{self._kind} has ended (exit status {process.ended.result()})")
            with contextlib.suppress(httpx2.HTTPError):
                await server.look()
                answered_s = clock.now()
            if clock.now() - answered_s > SILENT_S:
                raise WorkerLost(f"{self._kind} has not answered for {SILENT_S:.0f} s")

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def report(self, gateway_epoch: str, blocks_after: int | None) -> control.Beat:
        """See `worker.heartbeat.ReportingWorker`."""
        if self._info is None:
            raise NotReady(f"worker {self.spec.worker_id} has never been ready")
        server = self._server
        info = replace(self._info, ready=server is not None)
        if server is None:
            return control.Beat(info, WorkerLoad())
        others = [
            served.outstanding() for served in self._requests.values() if served.outbox.gateway_epoch != gateway_epoch
        ]
        load = replace(
            server.load,
            others_requests=len(others),
            others_tokens=sum(tokens for tokens, _ in others),
            others_prompt_tokens=sum(prompt_tokens for _, prompt_tokens in others),
        )
        peers = {peer.worker_id: peer for peers in self._peers.values() for peer in peers}
        return control.Beat(info, load, [_link_state(server, peer) for peer in peers.values()])

    def on_answer(self, registry_address: str, answer: control.BeatAnswer) -> None:
        """See `worker.heartbeat.ReportingWorker`."""
        peers, changed = tuple(answer.peers), self._membership.hear(answer)
        if changed and self._info is not None:
            self._info = replace(self._info, role=self._membership.role)
        if changed or peers != self._peers.get(registry_address, ()):
            self._peers[registry_address] = peers
            self.request_heartbeat()

    def on_silence(self, registry_address: str) -> None:
        """See `worker.heartbeat.ReportingWorker`."""
        if self._peers.keys() - {registry_address}:
            self._peers.pop(registry_address, None)

    def request_heartbeat(self) -> None:
        """Report to all gateways at once."""
        for heartbeat in self._heartbeats:
            heartbeat.wake()

    # --- calls -------------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> EngineWorker:
        if self._server is None or self._server.worker is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its server")
        return self._server.worker

    def begin(self, work: control.Work, outbox: Outbox, received_s: float) -> None:
        """See `worker.server.ControlledWorker`."""
        request, engine = work.request, self._engine
        attempt_id = request.attempt_id
        if attempt_id in self._requests:
            raise InvalidRequest(f"attempt_id: {attempt_id!r} is running on worker {self.spec.worker_id} already")
        served = _Served(work, outbox, lambda: self._requests.pop(attempt_id, None))
        self._requests[attempt_id] = served
        match work:
            case control.Run():
                engine.run(request, served, work.prefix_source)
            case control.Push():
                engine.push(request, work.peer, served, work.prefix_source)
            case control.Receive():
                engine.receive(request, work.peer, served, work.tell_ready)
            case control.SendPrefix():
                engine.send_prefix(request, work.peer, served)

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """See `worker.server.ControlledWorker`."""
        if self._server is not None:
            self._engine.hand_over(attempt_id, hand_off)

    async def abort(self, attempt_id: str) -> None:
        """See `worker.server.ControlledWorker`."""
        self._requests.pop(attempt_id, None)
        if self._server is not None:
            await self._engine.abort(attempt_id)

    def abort_all(self, outbox: Outbox) -> None:
        """See `worker.server.ControlledWorker`."""
        for attempt_id in [name for name, served in self._requests.items() if served.outbox is outbox]:
            task = asyncio.create_task(self.abort(attempt_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


def _link_state(server: Server, peer: KVPeer) -> control.LinkState:
    link = server.link_to(peer)
    outcome = link if isinstance(link, PeerLink) else control.Failure.of(link)
    return control.LinkState(peer.worker_id, peer.epoch, outcome)
