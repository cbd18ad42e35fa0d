"""A worker: an `Incarnation` (an engine with its KV ends), and the requests on it.

When the engine dies, `Worker.run` fails its requests with WorkerLost and begins a new incarnation with a new epoch. The
gateway sees the new epoch in the next heartbeat, and has links to this worker opened again.

Its role says what the gateways give it. They change it by their answers to heartbeats; the engine and the requests on
it go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from contract import control
from contract.control import Wire
from contract.engine import (
    CacheChanged,
    EngineEvent,
    Failed,
    Finished,
    Load,
    Pong,
    Ready,
    Rejected,
    SetTokenBudget,
    Step,
)
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock, MonotonicClock, clock_id
from pdserve.core.errors import InvalidRequest, LaunchError, ModelError, NotReady, PdserveError, WorkerLost
from pdserve.core.worker import SharedCores, WorkerInfo, WorkerLoad
from runtime.plane_tls import PlaneTls, plane_tls
from runtime.secret import ServiceSecret
from worker.cores import shared_cores
from worker.heartbeat import Heartbeat, registry_wire
from worker.incarnation import Incarnation, PoolMemory, StartEngine
from worker.links import LinkKeeper
from worker.membership import Membership
from worker.ports import WorkerPorts
from worker.request_table import Handler, RequestTable, ServedRequest
from worker.server import ControlServer, Outbox
from worker.spec import WorkerSpec

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
LOOK_EVERY_S = 2.0


class ServicePorts:
    """The ports of a worker of a real service (`worker.ports.WorkerPorts`): gRPC, and an engine process."""

    def __init__(
        self, spec: WorkerSpec, secret: ServiceSecret, clock: Clock, start_engine: StartEngine | None = None
    ) -> None:
        self._spec, self._secret, self._clock, self._start_engine = spec, secret, clock, start_engine
        self._tls: PlaneTls | None = None
        self._memory = PoolMemory()

    async def listen(self, server: ControlServer) -> None:
        """See `WorkerPorts`."""
        self._tls = plane_tls(self._spec.config.cluster)
        await server.start(self._spec.host, self._spec.port, self._tls)

    async def stop_listening(self, server: ControlServer) -> None:
        """See `WorkerPorts`."""
        await server.stop()

    def registry(self, address: str) -> Wire:
        """See `WorkerPorts`."""
        return registry_wire(address, self._secret, self._tls)

    async def start(self) -> Incarnation:
        """See `WorkerPorts`."""
        return await Incarnation.start(
            self._spec, self._secret, self._clock, self._tls, self._memory, self._start_engine
        )


class Worker:
    """One worker of the service with this ``secret``. ``handlers`` maps each kind of request that it serves to the
    coroutine that does. To take another role, it has to serve all of them.

    ``started`` has the worker's info once the first engine is ready, or the error that kept the engine from starting.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handlers: Mapping[type[control.Work], Handler],
        secret: ServiceSecret,
        clock: Clock | None = None,
        *,
        ports: WorkerPorts | None = None,
        chance: random.Random = SYSTEM,
    ) -> None:
        self.spec = spec
        self.clock = clock or MonotonicClock()
        self.started: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._membership = Membership(spec.worker_id, spec.role)
        self._ports = ports or ServicePorts(spec, secret, self.clock)
        self._life = chance.randbytes(16).hex()
        self._handlers = dict(handlers)
        self._table = RequestTable(spec.worker_id)
        self._incarnation: Incarnation | None = None
        self.notes: list[str] = []  # of its engine, for the user
        self._links: LinkKeeper | None = None
        self._info: WorkerInfo | None = None
        self._restarts = 0
        self._shared_cores: tuple[SharedCores, ...] = ()
        self._looked_s = -math.inf  # when they were looked up
        self._server = ControlServer(self, spec.worker_id, self.clock, secret)
        heartbeat_s = spec.config.router.heartbeat_s
        self._heartbeats = [
            Heartbeat(self, spec.worker_id, address, heartbeat_s) for address in spec.registry_addresses
        ]

    # --- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Raises the error that kept the first engine from starting. Later failures are retried,
        except for ModelError. WorkerLost if the gateway has superseded this worker."""
        try:
            await self._ports.listen(self._server)
            while True:
                if self._membership.superseded.done():  # while there was no engine
                    self._membership.superseded.result()
                try:
                    self._incarnation = await self._ports.start()
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
            for heartbeat in self._heartbeats:
                await heartbeat.stop()
            await self._end_incarnation()
            await self._ports.stop_listening(self._server)

    def _announce(self, incarnation: Incarnation) -> None:
        ready = incarnation.ready
        self.notes = [f"{self.spec.worker_id}: {note}" for note in ready.notes]
        self._info = WorkerInfo(
            worker_id=self.spec.worker_id,
            role=self._membership.role,
            epoch=incarnation.epoch,
            control_address=self._server.address,
            kv_endpoints=incarnation.kv_endpoints,
            node=self.spec.node,
            device=ready.device,
            pid=os.getpid(),
            engine_pid=incarnation.engine.pid,
            layout=ready.layout,
            dtype=ready.dtype,
            num_blocks=ready.num_blocks,
            max_model_len=ready.max_model_len,
            max_num_batched_tokens=self.spec.token_budget_as(self._membership.role),
            vocab_size=ready.vocab_size,
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            cores=",".join(str(core) for core in ready.cores),
            version=self.spec.version,
            engine_restarts=self._restarts,
            ready=True,
            clock_id=clock_id(),
            life=self._life,
            service=self.spec.service,
            eos_token_ids=tuple(ready.eos_token_ids),
            max_num_seqs=self.spec.config.engine.max_num_seqs,
            declares=tuple(ready.declares.items()),
        )
        self._set_token_budget(incarnation)
        kv = incarnation.kv
        self._links = LinkKeeper(kv.connect, lambda: kv.links, self.request_heartbeat)
        if not self.started.done():
            for heartbeat in self._heartbeats:
                heartbeat.start(self._ports.registry(heartbeat.registry_address))
        self.request_heartbeat()
        if not self.started.done():
            self.started.set_result(self._info)

    async def _serve(self, incarnation: Incarnation) -> None:
        watching = asyncio.create_task(incarnation.watchdog.run(lambda: self._on_silence(incarnation)))
        following = asyncio.create_task(self._follow(incarnation))
        try:
            await asyncio.wait((following, self._membership.superseded), return_when=asyncio.FIRST_COMPLETED)
            if self._membership.superseded.done():
                self._membership.superseded.result()
            await following
        finally:
            watching.cancel()
            following.cancel()

    def _on_silence(self, incarnation: Incarnation) -> None:
        """Report a change of the engine's silence. If the engine is silent, fail its requests now, before it is
        killed."""
        self.request_heartbeat()
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
            self.request_heartbeat()  # the gateways must not send more requests
        try:
            if links is not None:
                await links.aclose()
            why = f"the engine of worker {self.spec.worker_id} died; its requests are lost"
            self._table.fail_all(lambda: WorkerLost(why))
            await self._table.settled()
        finally:  # also if the worker is stopped meanwhile
            if incarnation is not None:
                await incarnation.stop()

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def report(self, gateway_epoch: str, blocks_after: int | None) -> control.Beat:
        """The content of the next heartbeat to the gateway of this epoch, with the changes of the prefix cache after
        that position (None: without). NotReady before the first engine is ready."""
        links = [] if self._links is None else self._links.states()
        requests, tokens, prompt_tokens = self._table.outstanding(gateway_epoch)
        load = replace(self.load, others_requests=requests, others_tokens=tokens, others_prompt_tokens=prompt_tokens)
        cached = None if self._incarnation is None else self._incarnation.cached_blocks
        if cached is None or blocks_after is None or blocks_after == cached.ends:
            return control.Beat(self.info, load, links)
        return control.Beat(self.info, load, links, cached.since(blocks_after))

    def on_answer(self, registry_address: str, answer: control.BeatAnswer) -> None:
        """Act on a gateway's answer to a heartbeat. A superseded worker ends: another worker has taken its name, it was
        retired, or it belongs to another service. `run` then raises WorkerLost."""
        if self._membership.hear(answer):
            self._take_role()
        if self._links is not None:
            self._links.want(registry_address, answer.peers)

    def _take_role(self) -> None:
        """Take the role that the worker has now, and report it to all gateways at once. Requests in progress go on."""
        role = self._membership.role
        if self._info is not None:
            tokens = self.spec.token_budget_as(role)
            self._info = replace(self._info, role=role, max_num_batched_tokens=tokens)
        if self._incarnation is not None:
            self._set_token_budget(self._incarnation)
        self.request_heartbeat()

    def _set_token_budget(self, incarnation: Incarnation) -> None:
        incarnation.engine.send(SetTokenBudget(self.spec.token_budget_as(self._membership.role)))

    def on_silence(self, registry_address: str) -> None:
        """Note that a gateway does not answer."""
        if self._links is not None:
            self._links.forget(registry_address)

    def request_heartbeat(self) -> None:
        """Report to all gateways at once."""
        for heartbeat in self._heartbeats:
            heartbeat.wake()

    @property
    def info(self) -> WorkerInfo:
        """This worker's current info. NotReady before the first engine is ready."""
        if self._info is None:
            raise NotReady(f"worker {self.spec.worker_id} has never been ready")
        ready = self._incarnation is not None and not self._incarnation.watchdog.is_silent
        return replace(self._info, ready=ready)

    @property
    def load(self) -> WorkerLoad:
        """The load and the steps of the engine, the messages that the KV end has refused, and the cores that its engine
        shares."""
        if self._incarnation is None:
            return WorkerLoad()
        load = msgspec.structs.asdict(self._incarnation.load)
        if self._incarnation.load.steps is None:
            load |= {"steps": self._incarnation.steps, "busy_s": self._incarnation.busy_s}
        return WorkerLoad(**load, kv_refused=self._incarnation.kv.refused, shared_cores=self._shared())

    def _shared(self) -> tuple[SharedCores, ...]:
        """The cores shared with other engines, looked up at most every `LOOK_EVERY_S`: services come and go."""
        now_s = self.clock.now()
        if self.spec.cores and now_s - self._looked_s >= LOOK_EVERY_S:
            self._shared_cores, self._looked_s = shared_cores(self.spec), now_s
        return self._shared_cores

    # --- calls -------------------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> Incarnation:
        """The current incarnation. NotReady while the engine starts."""
        if self._incarnation is None:
            raise NotReady(f"worker {self.spec.worker_id} is starting its engine")
        return self._incarnation

    def begin(self, work: control.Work, outbox: Outbox, received_s: float) -> None:
        """Begin to serve a request, which was received at ``received_s`` of this worker's clock. Raises InvalidRequest
        or NotReady; later errors are sent over ``outbox``."""
        handler, worker_id, request = self._handlers.get(type(work)), self.spec.worker_id, work.request
        if handler is None:
            what = type(work).__name__.lower()
            raise InvalidRequest(f"worker {worker_id} is a {self._membership.role} worker and cannot {what}")
        if self.incarnation.watchdog.is_silent:
            raise NotReady(f"the engine of worker {worker_id} does not answer")
        if request.attempt_id in self._table:
            raise InvalidRequest(f"attempt_id: {request.attempt_id!r} is running on worker {worker_id} already")
        resources = self.incarnation.resources
        served = ServedRequest(work, resources, outbox, worker_id=worker_id, received_s=received_s)
        self._table.begin(served, handler)

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Nothing: pdserve's engines tell each other over the KV link."""

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
                incarnation.steps += 1
                incarnation.busy_s += event.sampled_s - event.step_started_s
                self._table.on_step(event)
            case Load():
                incarnation.load = event
            case CacheChanged():
                incarnation.cached_blocks.change(event.added, event.removed)
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
