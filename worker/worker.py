"""What every worker is made of: an engine with its KV ends (an `Incarnation`), and the requests on it.

`run` serves until the engine dies, fails what was on it with WorkerLost, and begins a new incarnation with a new epoch:
the gateway sees the epoch change and shakes hands anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace

from engine.messages import (
    EngineEvent,
    Failed,
    Finished,
    KVRole,
    LayersDone,
    Load,
    Pong,
    PrefixFound,
    Ready,
    Rejected,
    Reserved,
    Step,
)
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LaunchError,
    ModelError,
    NotReady,
    PdserveError,
    RequestAborted,
    WorkerLost,
    from_wire,
    to_wire,
)
from pdserve.core.handoff import KVDestination
from pdserve.core.worker import Work, WorkerInfo, WorkerLoad
from worker.flow import Flow
from worker.heartbeat import Heartbeat
from worker.incarnation import Incarnation
from worker.outbox import Outbox
from worker.server import ControlServer
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 5.0
DEADLINE_GRACE_S = 1.0
"""The gateway aborts at the deadline; a worker whose gateway does not gives the blocks back this much later."""


class Worker:
    """One worker process's whole content. ``flows`` says which ways of serving a request this worker has.

    ``started`` is done when the first engine is ready, or with what kept it from being so.
    """

    def __init__(self, spec: WorkerSpec, flows: Mapping[KVRole, type[Flow]], clock: Clock | None = None) -> None:
        self.spec = spec
        self.clock = clock or MonotonicClock()
        self.started: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = uuid.uuid4().hex
        self._flow_types = dict(flows)
        self._flows: dict[str, Flow] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._incarnation: Incarnation | None = None
        self._info: WorkerInfo | None = None
        self._restarts = 0
        self._server = ControlServer(self)
        self._heartbeat = Heartbeat(self)

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises what kept the very first engine from starting; later failures are retried,
        except when the model itself is at fault."""
        try:
            await self._server.start(self.spec.host, self.spec.port)
            while True:
                try:
                    self._incarnation = await Incarnation.start(self.spec, self.clock)
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
                told = error if isinstance(error, PdserveError) else LaunchError(f"{type(error).__name__}: {error}")
                self.started.set_exception(told)
            raise
        finally:
            await self._heartbeat.stop()
            await self._end_incarnation()
            await self._server.stop()

    def supersede(self) -> None:
        """The gateway wants this worker no more: another has taken its name while it was cut off, it was retired, or it
        belongs to another service. `run` ends with WorkerLost."""
        if not self._superseded.done():
            why = f"worker {self.spec.worker_id} was replaced or retired, and ends"
            self._superseded.set_exception(WorkerLost(why))

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
            layout=incarnation.layout,
            num_blocks=ready.num_blocks,
            max_model_len=ready.max_model_len,
            max_num_batched_tokens=self.spec.config.engine.max_num_batched_tokens,
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
        self._heartbeat.start()
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
        """The engine has been silent for some time, or has come back: its requests need not wait until it is killed."""
        self._heartbeat.wake()
        if incarnation.watchdog.is_silent:
            for flow in list(self._flows.values()):
                self.fail(flow, WorkerLost(f"the engine of worker {self.spec.worker_id} does not answer"))

    async def _follow(self, incarnation: Incarnation) -> None:
        async for event in incarnation.engine.events():
            self._on_event(event, incarnation)

    async def _end_incarnation(self) -> None:
        """The engine is gone or has to go: everything on it is lost, its pool and epoch too."""
        incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            self._heartbeat.wake()  # the gateway must not send more requests
        for flow in list(self._flows.values()):
            self.fail(flow, WorkerLost(f"the engine of worker {self.spec.worker_id} died; its requests are lost"))
        if self._closing:
            await asyncio.wait(self._closing.values(), timeout=CLOSE_TIMEOUT_S)
        if incarnation is not None:
            await incarnation.stop()

    # --- what the gateway is told ------------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        """This worker, as it is now; NotReady before its first engine is ready."""
        if self._info is None:
            raise NotReady(f"worker {self.spec.worker_id} has never been ready")
        ready = self._incarnation is not None and not self._incarnation.watchdog.is_silent
        return replace(self._info, ready=ready)

    @property
    def load(self) -> WorkerLoad:
        """How full the engine is, and the workers this one has shaken hands with."""
        if self._incarnation is None:
            return WorkerLoad()
        return replace(
            self._incarnation.load, links=self._incarnation.kv.links, kv_refused=self._incarnation.kv.refused
        )

    # --- flows ----------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> Incarnation:
        """The engine and KV ends there are now; NotReady while there are none."""
        if self._incarnation is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return self._incarnation

    def has(self, flow: Flow) -> bool:
        """Whether the flow is not over yet."""
        return self._flows.get(flow.request_id) is flow

    def forget(self, flow: Flow) -> None:
        """The flow is over and holds nothing any more."""
        if self.has(flow):
            del self._flows[flow.request_id]
            self._deadlines.pop(flow.request_id).cancel()

    def fail(self, flow: Flow, error: PdserveError) -> None:
        """The flow is over because of ``error``: tell the gateway, wake who waits in it, give everything back."""
        if not self.has(flow):
            return
        if not isinstance(error, RequestAborted):
            log.warning("%s: request %s failed: %s", self.spec.worker_id, flow.request_id, error)
            flow.outbox.error(flow.request_id, error)
        flow.on_failed(error)
        self.forget(flow)
        if self._incarnation is flow.incarnation:  # else everything it held is gone already
            task = asyncio.get_running_loop().create_task(flow.close())
            self._closing[flow.request_id] = task
            task.add_done_callback(lambda _: self._closing.pop(flow.request_id, None))

    # --- calls -------------------------------------------------------------------------------------------------------

    async def begin(
        self, kv_role: KVRole, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> KVDestination | None:
        """A new request. Raises InvalidRequest, NotReady, CapacityExceeded or what the flow's start raises."""
        kind = self._flow_types.get(kv_role)
        if kind is None:
            raise InvalidRequest(f"worker {self.spec.worker_id} is a {self.spec.role} worker and cannot do {kv_role}")
        if self.incarnation.watchdog.is_silent:
            raise NotReady(f"the engine of worker {self.spec.worker_id} does not answer")
        if work.request_id in self._flows:
            raise InvalidRequest(f"request_id: {work.request_id!r} is running on worker {self.spec.worker_id} already")
        flow = kind(self, work, outbox, received_s, destination)
        self._flows[work.request_id] = flow
        self._deadlines[work.request_id] = asyncio.get_running_loop().call_later(
            work.timeout_s + DEADLINE_GRACE_S,
            self.fail,
            flow,
            DeadlineExceeded(f"request {work.request_id} outlived its deadline on worker {self.spec.worker_id}"),
        )
        try:
            return await flow.start()
        except Exception as error:
            self.fail(flow, error if isinstance(error, PdserveError) else from_wire(*to_wire(error)))
            raise

    async def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are fine. Returns when everything it held is given back, whatever other requests
        still have to give back."""
        flow = self._flows.get(request_id)
        if flow is not None:
            self.fail(flow, RequestAborted(f"request {request_id} was aborted"))
        if (closing := self._closing.get(request_id)) is not None:
            await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)

    def abort_all(self, outbox: Outbox) -> None:
        """The gateway behind ``outbox`` is gone: drop everything it asked for."""
        for flow in [f for f in self._flows.values() if f.outbox is outbox]:
            self.fail(flow, RequestAborted("the gateway's control stream ended"))

    # --- engine events -----------------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent, incarnation: Incarnation) -> None:
        match event:
            case Step():
                self._on_step(event)
            case Load():
                incarnation.load = WorkerLoad(**asdict(event))
            case LayersDone():
                self._on_layers(event, incarnation)
            case Reserved():
                if flow := self._flows.get(event.request_id):
                    flow.on_reserved(event)
            case PrefixFound():
                if flow := self._flows.get(event.request_id):
                    flow.on_prefix_found(event)
            case Rejected():
                if flow := self._flows.get(event.request_id):
                    self.fail(flow, from_wire(event.kind, event.message))
            case Finished():
                if flow := self._flows.get(event.request_id):
                    flow.on_finished(event)
            case Failed():
                log.error("%s: the engine gave up: %s: %s", self.spec.worker_id, event.kind, event.message)
            case Pong():
                incarnation.watchdog.pong()
            case Ready():
                raise AssertionError("an engine is ready once")

    def _on_layers(self, event: LayersDone, incarnation: Incarnation) -> None:
        incarnation.computing = event.progress or incarnation.computing
        for progress in incarnation.computing:
            if flow := self._flows.get(progress.request_id):
                flow.on_layers(progress, event.num_layers)

    def _on_step(self, step: Step) -> None:
        for progress in step.progress:
            if flow := self._flows.get(progress.request_id):
                flow.on_progress(progress)
        for token in step.tokens:
            owner = self._flows.get(token.request_id)
            if owner is None:
                continue
            owner.outbox.output(owner.request_id, owner.on_token(token, step))
            if token.finish_reason and not owner.holds_after_finish:
                self.forget(owner)
