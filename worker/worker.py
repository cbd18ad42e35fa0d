"""What every worker is made of: an engine process, its KV ends and the requests on it, behind a control server.

`run` starts the engine, serves until the engine dies, fails what was on it with WorkerLost, and starts a new engine
with a new epoch: the gateway sees the epoch change and shakes hands anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping

from engine.client import EngineClient
from kv_transfer.factory import create_transport

from core.clock import Clock, MonotonicClock, clock_id
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    NotReady,
    PdserveError,
    RequestAborted,
    WorkerLost,
    from_wire,
)
from core.handoff import KVDestination, KVEndpoint
from core.kv_layout import KVLayout
from core.worker import Work, WorkerInfo, WorkerLoad
from engine.messages import Failed, KVRole, Load, Ready, Rejected, Reserved, Step
from engine.spec import EngineSpec
from worker.flow import Flow
from worker.heartbeat import Heartbeat
from worker.kv import KVEnds
from worker.outbox import Outbox
from worker.server import ControlServer
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
DEADLINE_GRACE_S = 1.0
"""The gateway aborts at the deadline; a worker whose gateway does not gives the blocks back this much later."""


class Worker:
    """One worker process's whole content. ``flows`` says which ways of serving a request this worker has."""

    def __init__(self, spec: WorkerSpec, flows: Mapping[KVRole, type[Flow]], clock: Clock | None = None) -> None:
        self.spec = spec
        self.clock = clock or MonotonicClock()
        self._flow_types = dict(flows)
        self._flows: dict[str, Flow] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._engine: EngineClient | None = None
        self._kv: KVEnds | None = None
        self._ready: Ready | None = None
        self._epoch = ""
        self._kv_endpoint = KVEndpoint("", "")
        self._load = WorkerLoad()
        self._restarts = 0
        self._server = ControlServer(self)
        self._heartbeat = Heartbeat(self)
        self._started: asyncio.Future[WorkerInfo] | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises what kept the very first engine from starting; later failures are retried."""
        try:
            await self._server.start(self.spec.host)
            while True:
                try:
                    await self._start_engine()
                except PdserveError as error:
                    if self._restarts == 0 or isinstance(error, ModelError):
                        raise
                    log.warning("%s: the engine did not start again: %s", self.spec.worker_id, error)
                else:
                    self._heartbeat.start()
                    self._heartbeat.wake()
                    if not self.started.done():
                        self.started.set_result(self.info)
                    await self._serve_engine()
                await self._drop_engine()
                self._restarts += 1
                await asyncio.sleep(RESTART_PAUSE_S)
        except PdserveError as error:
            if not self.started.done():
                self.started.set_exception(error)
            raise
        finally:
            await self._heartbeat.stop()
            await self._drop_engine()
            await self._server.stop()

    @property
    def started(self) -> asyncio.Future[WorkerInfo]:
        """Done when the first engine is ready, or with what kept it from being so."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
        return self._started

    async def _start_engine(self) -> None:
        config, transfer = self.spec.config.engine, self.spec.config.transfer
        delays = self.spec.config.testing.delay_ms
        engine = EngineClient()
        self._engine = engine
        self._ready = await engine.start(
            EngineSpec(
                model=self.spec.config.model.path,
                dtype=self.spec.config.model.dtype,
                device=self.spec.device,
                cores=self.spec.cores,
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                kv_memory_bytes=None if config.kv_memory_mb is None else config.kv_memory_mb * 2**20,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                delay_s={stage: ms / 1e3 for stage, ms in delays.items()},
            ),
            self.spec.config.cluster.start_timeout_s,
        )
        self._epoch = uuid.uuid4().hex
        transport = create_transport(self.transport_name, device=self.spec.device)
        self._kv = KVEnds(
            engine.open_pool(),
            transport,
            transfer,
            worker_id=self.spec.worker_id,
            epoch=self._epoch,
            clock=self.clock,
            delay_s=delays.get("kv_exposed", 0.0) / 1e3,
        )
        self._kv_endpoint = await self._kv.start(transfer.interface or self.spec.host)
        self._load = WorkerLoad(free_blocks=self._ready.num_blocks)
        log.info("%s: engine ready on %s, KV at %s", self.spec.worker_id, self._ready.device, self._kv_endpoint)

    @property
    def transport_name(self) -> str:
        """The transport this worker's KV travels by."""
        name = self.spec.config.transfer.transport
        if name != "auto":
            return name
        return "torch_dist" if self.spec.device == "cuda" else "grpc_stream"

    async def _serve_engine(self) -> None:
        async for event in self.engine.events():
            match event:
                case Step():
                    self._on_step(event)
                case Load():
                    self._load = WorkerLoad(event.free_blocks, event.running, event.waiting, event.preemptions)
                case Reserved():
                    if flow := self._flows.get(event.request_id):
                        flow.on_reserved(event)
                case Rejected():
                    if flow := self._flows.get(event.request_id):
                        self.fail(flow, from_wire(event.kind, event.message))
                case Failed():
                    log.error("%s: the engine gave up: %s: %s", self.spec.worker_id, event.kind, event.message)
                case Ready():
                    raise AssertionError("an engine is ready once")

    async def _drop_engine(self) -> None:
        """The engine is gone or has to go: everything on it is lost, its pool and epoch too."""
        self._ready = None
        for flow in list(self._flows.values()):
            self.fail(flow, WorkerLost(f"the engine of worker {self.spec.worker_id} died; its requests are lost"))
        if self._closing:
            await asyncio.wait(self._closing, timeout=5.0)
        if self._kv is not None:
            await self._kv.aclose()
            self._kv = None
        if self._engine is not None:
            await self._engine.stop(timeout_s=5.0)
            self._engine = None

    # --- what flows use ----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineClient:
        """The engine; NotReady while there is none."""
        if self._engine is None or self._ready is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return self._engine

    @property
    def kv(self) -> KVEnds:
        """The KV ends; NotReady while there are none."""
        if self._kv is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return self._kv

    @property
    def layout(self) -> KVLayout:
        """The pool's layout; NotReady while there is none."""
        if self._ready is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return KVLayout.from_wire(self._ready.layout)

    def forget(self, flow: Flow) -> None:
        """The flow is over and holds nothing any more."""
        if self._flows.get(flow.request_id) is flow:
            del self._flows[flow.request_id]
            self._deadlines.pop(flow.request_id).cancel()

    def fail(self, flow: Flow, error: PdserveError) -> None:
        """The flow is over because of ``error``: tell the gateway, wake who waits in it, give everything back."""
        if self._flows.get(flow.request_id) is not flow:
            return
        if not isinstance(error, RequestAborted):
            log.warning("%s: request %s failed: %s", self.spec.worker_id, flow.request_id, error)
            flow.outbox.error(flow.request_id, error)
        flow.on_failed(error)
        self.forget(flow)
        if self._ready is not None:
            task = asyncio.get_running_loop().create_task(flow.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    # --- calls -------------------------------------------------------------------------------------------------------

    async def begin(
        self, kv_role: KVRole, work: Work, outbox: Outbox, received_s: float, destination: KVDestination | None = None
    ) -> KVDestination | None:
        """A new request. Raises InvalidRequest, NotReady, CapacityExceeded or what the flow's start raises."""
        kind = self._flow_types.get(kv_role)
        if kind is None:
            raise InvalidRequest(f"worker {self.spec.worker_id} is a {self.spec.role} worker and cannot do {kv_role}")
        if work.request_id in self._flows:
            raise InvalidRequest(f"request_id: {work.request_id!r} is running on worker {self.spec.worker_id} already")
        if self._ready is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
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
        except PdserveError as error:
            self.fail(flow, error)
            raise

    async def abort(self, request_id: str) -> None:
        """Drop a request; unknown ids are fine. Returns when everything it held is given back."""
        flow = self._flows.get(request_id)
        if flow is not None:
            self.fail(flow, RequestAborted(f"request {request_id} was aborted"))
        if self._closing:
            await asyncio.wait(self._closing, timeout=5.0)

    def abort_all(self, outbox: Outbox) -> None:
        """The gateway behind ``outbox`` is gone: drop everything it asked for."""
        for flow in [f for f in self._flows.values() if f.outbox is outbox]:
            self.fail(flow, RequestAborted("the gateway's control stream ended"))

    # --- engine events -----------------------------------------------------------------------------------------------

    def _on_step(self, step: Step) -> None:
        for progress in step.progress:
            if flow := self._flows.get(progress.request_id):
                flow.on_progress(progress)
        for token in step.tokens:
            flow = self._flows.get(token.request_id)
            if flow is None:
                continue
            flow.outbox.output(flow.request_id, flow.on_token(token, step))
            if token.finish_reason and not flow.holds_after_finish:
                self.forget(flow)

    # --- what is told to the gateway ---------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        """This worker, as it is now. Before the first engine is ready: NotReady."""
        ready = self._ready
        if ready is None and self._last_info is None:
            raise NotReady(f"worker {self.spec.worker_id} has never been ready")
        if ready is None:
            assert self._last_info is not None
            return self._last_info
        self._last_info = WorkerInfo(
            worker_id=self.spec.worker_id,
            role=self.spec.role,
            epoch=self._epoch,
            control_address=self._server.address,
            kv_endpoint=self._kv_endpoint,
            node=self.spec.node,
            device=ready.device,
            pid=os.getpid(),
            engine_pid=self.engine.pid,
            layout=KVLayout.from_wire(ready.layout),
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
        )
        return self._last_info

    _last_info: WorkerInfo | None = None

    @property
    def is_ready(self) -> bool:
        """Whether an engine is there to take requests."""
        return self._ready is not None

    @property
    def load(self) -> WorkerLoad:
        """How full the engine is, and the workers this one has shaken hands with."""
        load = self._load
        peers = self._kv.peers if self._kv is not None else ()
        return WorkerLoad(load.free_blocks, load.running, load.waiting, load.preemptions, peers)
