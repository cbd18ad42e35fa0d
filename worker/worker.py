"""A worker: an `Incarnation` (an engine with its KV ends), and the requests on it.

When the engine dies, `Worker.run` fails its requests with WorkerLost and begins a new incarnation with a new epoch. The
gateway sees the new epoch in the next heartbeat, and has links to this worker opened again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from engine.messages import EngineEvent, Failed, Finished, Load, Pong, Ready, Rejected, Step
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import InvalidRequest, LaunchError, ModelError, NotReady, PdserveError, WorkerLost
from pdserve.core.plane_tls import PlaneTls, plane_tls
from pdserve.core.secret import ServiceSecret
from pdserve.core.worker import WorkerInfo, WorkerLoad
from worker import messages
from worker.heartbeat import Heartbeat
from worker.incarnation import Incarnation
from worker.links import LinkKeeper
from worker.request_table import RequestTable, Role, ServedRequest
from worker.server import ControlServer, Outbox
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0


class Worker:
    """One worker of the service with this ``secret``. ``roles`` maps each kind of request that it serves to the
    coroutine that serves it.

    ``started`` has the worker's info once the first engine is ready, or the error that kept the engine from starting.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        roles: Mapping[type[messages.Work], Role],
        secret: ServiceSecret,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self._secret = secret
        self._tls: PlaneTls | None = None
        self.clock = clock or MonotonicClock()
        self.started: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = uuid.uuid4().hex
        self._roles = dict(roles)
        self._table = RequestTable(spec.worker_id)
        self._incarnation: Incarnation | None = None
        self._links: LinkKeeper | None = None
        self._info: WorkerInfo | None = None
        self._restarts = 0
        self._server = ControlServer(self, spec.worker_id, self.clock, secret)
        heartbeat_s = spec.config.router.heartbeat_s
        self._heartbeat = Heartbeat(self, spec.worker_id, spec.registry_address, heartbeat_s, secret)

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises the error that kept the first engine from starting. Later failures are retried,
        except for ModelError. WorkerLost if the gateway has superseded this worker."""
        try:
            tls = self._tls = plane_tls(self.spec.config.cluster)
            await self._server.start(self.spec.host, self.spec.port, tls)
            while True:
                try:
                    self._incarnation = await Incarnation.start(self.spec, self._secret, self.clock, tls)
                except PdserveError as error:
                    if not self.started.done() or isinstance(error, ModelError):
                        raise
                    log.warning("%s: the engine did not start again: %s", self.spec.worker_id, error)
                else:
                    self._announce(self._incarnation)
                    await self._serve(self._incarnation)
                    await self._end_incarnation()
                self._restarts += 1
                await asyncio.sleep(RESTART_PAUSE_S)
        except Exception as error:
            if not self.started.done():
                failure = error if isinstance(error, PdserveError) else LaunchError(f"{type(error).__name__}: {error}")
                self.started.set_exception(failure)
            raise
        finally:
            await self._heartbeat.stop()
            await self._end_incarnation()
            await self._server.stop()

    def _announce(self, incarnation: Incarnation) -> None:
        ready = incarnation.ready
        self._info = WorkerInfo(
            worker_id=self.spec.worker_id,
            role=self.spec.role,
            epoch=incarnation.epoch,
            control_address=self._server.address,
            kv_endpoints=incarnation.kv_endpoints,
            node=self.spec.node,
            device=ready.device,
            pid=os.getpid(),
            engine_pid=incarnation.engine.pid,
            layout=ready.layout,
            num_blocks=ready.num_blocks,
            max_model_len=ready.max_model_len,
            max_num_batched_tokens=self.spec.token_budget,
            vocab_size=ready.vocab_size,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            cores=",".join(str(core) for core in ready.cores),
            version=self.spec.version,
            engine_restarts=self._restarts,
            ready=True,
            clock_id=clock_id(),
            life=self._life,
            service=self.spec.service,
        )
        kv = incarnation.kv
        self._links = LinkKeeper(kv.connect, lambda: kv.links, self._heartbeat.wake)
        self._heartbeat.start(self._tls)
        self._heartbeat.wake()
        if not self.started.done():
            self.started.set_result(self._info)

    async def _serve(self, incarnation: Incarnation) -> None:
        watching = asyncio.create_task(incarnation.watchdog.run(lambda: self._on_silence(incarnation)))
        following = asyncio.create_task(self._follow(incarnation))
        try:
            await asyncio.wait((following, self._superseded), return_when=asyncio.FIRST_COMPLETED)
            if self._superseded.done():
                self._superseded.result()
            await following
        finally:
            watching.cancel()
            following.cancel()

    def _on_silence(self, incarnation: Incarnation) -> None:
        """Report a change of the engine's silence. If the engine is silent, fail its requests now, before it is
        killed."""
        self._heartbeat.wake()
        if incarnation.watchdog.is_silent:
            self._table.fail_all(lambda: WorkerLost(f"the engine of worker {self.spec.worker_id} does not answer"))

    async def _follow(self, incarnation: Incarnation) -> None:
        async for event in incarnation.engine.events():
            self._on_event(event, incarnation)

    async def _end_incarnation(self) -> None:
        """End the incarnation: fail its requests and links, then stop its KV ends and engine."""
        incarnation, self._incarnation = self._incarnation, None
        links, self._links = self._links, None
        if incarnation is not None:
            self._heartbeat.wake()  # the gateway must not send more requests
        if links is not None:
            await links.aclose()
        why = f"the engine of worker {self.spec.worker_id} died; its requests are lost"
        self._table.fail_all(lambda: WorkerLost(why))
        await self._table.settled()
        if incarnation is not None:
            await incarnation.stop()

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def report(self) -> messages.Beat:
        """The content of the next heartbeat. NotReady before the first engine is ready."""
        return messages.Beat(self.info, self.load, [] if self._links is None else self._links.states())

    def on_answer(self, answer: messages.BeatAnswer) -> None:
        """Act on the gateway's answer to a heartbeat. A superseded worker ends: another worker has taken its name, it
        was retired, or it belongs to another service. `run` then raises WorkerLost."""
        if self._links is not None:
            self._links.want(answer.peers)
        if answer.superseded and not self._superseded.done():
            why = f"worker {self.spec.worker_id} was replaced or retired, and ends"
            self._superseded.set_exception(WorkerLost(why))

    def beat_now(self) -> None:
        """Report to the gateway at once."""
        self._heartbeat.wake()

    @property
    def info(self) -> WorkerInfo:
        """This worker's current info. NotReady before the first engine is ready."""
        if self._info is None:
            raise NotReady(f"worker {self.spec.worker_id} has never been ready")
        ready = self._incarnation is not None and not self._incarnation.watchdog.is_silent
        return replace(self._info, ready=ready)

    @property
    def load(self) -> WorkerLoad:
        """The load of the engine, and the messages that the KV end has refused."""
        if self._incarnation is None:
            return WorkerLoad()
        return replace(self._incarnation.load, kv_refused=self._incarnation.kv.refused)

    # --- calls -------------------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> Incarnation:
        """The current incarnation. NotReady while the engine starts."""
        if self._incarnation is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return self._incarnation

    def begin(self, work: messages.Work, outbox: Outbox, received_s: float) -> None:
        """Begin to serve a request, which was received at ``received_s`` of this worker's clock. Raises InvalidRequest
        or NotReady; later errors are sent over ``outbox``."""
        role, worker_id, request = self._roles.get(type(work)), self.spec.worker_id, work.request
        if role is None:
            what = type(work).__name__.lower()
            raise InvalidRequest(f"worker {worker_id} is a {self.spec.role} worker and cannot {what}")
        if self.incarnation.watchdog.is_silent:
            raise NotReady(f"the engine of worker {worker_id} does not answer")
        if request.attempt_id in self._table:
            raise InvalidRequest(f"attempt_id: {request.attempt_id!r} is running on worker {worker_id} already")
        peer = None if isinstance(work, messages.Run) else work.peer
        served = ServedRequest(
            request,
            peer,
            self.incarnation.resources,
            outbox,
            worker_id=worker_id,
            received_s=received_s,
            tells_ready=isinstance(work, messages.Receive) and work.tell_ready,
        )
        self._table.begin(served, role)

    async def abort(self, attempt_id: str) -> None:
        """Abort a request. Returns when its resources are released. Unknown ids are ignored."""
        await self._table.abort(attempt_id)

    def abort_all(self, outbox: Outbox) -> None:
        """Abort all requests that came over the stream of ``outbox``, because the stream has ended."""
        self._table.abort_all(outbox)

    # --- engine events -----------------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent, incarnation: Incarnation) -> None:
        incarnation.watchdog.progressed()
        match event:
            case Step():
                self._table.on_step(event)
            case Load():
                incarnation.load = WorkerLoad(**msgspec.structs.asdict(event))
            case Rejected():
                self._table.on_rejected(event)
            case Finished():
                self._table.on_finished(event)
            case Failed():
                log.error("%s: the engine failed: %s: %s", self.spec.worker_id, event.kind, event.message)
            case Pong():
                incarnation.watchdog.pong()
            case Ready():
                raise AssertionError("an engine reports Ready only once")
