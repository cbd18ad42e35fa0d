"""A service of simulated engines and links: what the router decides is decided by its own code, and so is what each
engine schedules. Only steps and transfers are replaced, by the time that they take."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from contract.control import WorkerHandle
from contract.engine import (
    Abort,
    CacheChanged,
    Computed,
    EngineEvent,
    Finished,
    KVEvent,
    KVReady,
    KVRole,
    Load,
    Progress,
    Rejected,
    Release,
    Reserved,
    Step,
    Submit,
)
from engine.scheduling.scheduler import SchedulerConfig
from pdserve.core.config import RouterConfig
from pdserve.core.errors import PdserveError
from pdserve.core.handoff import PeerLink
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role, WorkerInfo, WorkerLoad
from router.fair_queue import Waiting
from router.registry import Assignment, WorkerRegistry
from router.retries import RETRY_PAUSE_S
from router.view import Needs, WaitMode
from router.waiting_line import WaitingLine
from simulator.loop import Stuck, World, WorldLoop
from simulator.planning.engine import TOKEN_ID, PlannedEngine
from simulator.planning.flows import Flow, Pipe
from simulator.planning.step_time import StepTime
from worker.incarnation import CachedBlocks

_STANDSTILL_S = 1e4
"""After so long without an arrival or an end, the requests that are left count as failed: each of two workers holds
blocks for hand-offs for which the other one has none. A service would try them again."""


class Overheads(msgspec.Struct, frozen=True):
    """Seconds that a request spends beside engines and links: from the client's call to the choice of workers
    (``arrive_s``), from there to an engine (``dispatch_s``), from a sampled token to the client (``answer_s``), from
    decode's allocation of blocks to the prefill worker that is told of it (``announce_s``), from the arrival of the
    last bytes to decode's engine (``handoff_s``), and between two steps of an engine (``between_s``)."""

    arrive_s: float = 0.0
    dispatch_s: float = 0.0
    answer_s: float = 0.0
    announce_s: float = 0.0
    handoff_s: float = 0.0
    between_s: float = 0.0


class LinkClass(msgspec.Struct, frozen=True):
    """What links of a kind carry: bytes per second in each direction, one message after ``latency_s``, and for one
    hand-off at most ``most_bytes_per_s``. What is sent keeps the device of the sender from computing at
    ``sender_bytes_per_s``, and that of the receiver at ``receiver_bytes_per_s``."""

    bytes_per_s: float
    latency_s: float = 0.0
    most_bytes_per_s: float = math.inf
    sender_bytes_per_s: float = math.inf
    receiver_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker: its role, the host that it is on, what its steps take, and the limits of its engine.

    The duration of a step that computes one token of each request is multiplied by a factor of ``spread``, which is
    drawn at random; their mean is 1. If ``spread`` is empty, all steps take what ``steps`` says."""

    worker_id: str
    role: Role
    host: str
    steps: StepTime
    num_blocks: int
    token_budget: int
    max_num_seqs: int = 64
    chunk_tokens: int | None = None
    run_ahead: bool = False
    spread: tuple[float, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """A worker is lost ``at_s`` seconds after the start, with all that it has, and is back ``for_s`` later. The router
    knows it at once. A failure of a worker that is lost does nothing."""

    worker_id: str
    at_s: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class PlannedService:
    """What is simulated. ``within`` are the links of a host, of which each worker has its own, ``between`` those of
    hosts, which the workers of a host share, and ``shared`` one that all transfers between prefill and decode workers
    share, as between two sites. ``max_model_len``: tokens of a request."""

    workers: Sequence[PlannedWorker]
    layout: KVLayout
    within: LinkClass
    between: LinkClass | None = None
    shared: LinkClass | None = None
    overheads: Overheads = field(default_factory=Overheads)
    router: RouterConfig = field(default_factory=RouterConfig)
    layer_groups: int = 0
    prefix_caching: bool = False
    max_model_len: int = 1 << 20
    failures: Sequence[Failure] = ()


class PlannedTurn(msgspec.Struct, frozen=True):
    """The new part of a prompt, how many tokens to generate, and the pause before it."""

    token_ids: tuple[int, ...]
    output_len: int
    pause_s: float = 0.0


class PlannedRequests(msgspec.Struct, frozen=True):
    """A conversation that begins at ``at_s``. Conversations with an equal salt share what is cached, and
    those without one share nothing."""

    at_s: float
    turns: tuple[PlannedTurn, ...]
    salt: str = ""
    session_id: str = ""


class RequestResult(msgspec.Struct, frozen=True):
    """How a request was served. Times are seconds from its sending; those that it does not have are negative. ``itl_s``
    has the gaps between its tokens."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float = -1.0
    ttft_decode_s: float = -1.0
    e2e_s: float = -1.0
    exposed_s: float = -1.0
    """From token 1 to the last block at the decode worker."""
    kv_blocks: int = 0
    """Of the last attempt."""
    itl_s: tuple[float, ...] = ()
    error: str = ""
    attempts: int = 1


class WorkerUse(msgspec.Struct, frozen=True):
    """How much a worker was used: the share of the time in which it computed, steps, and preemptions."""

    worker_id: str
    busy: float
    steps: int
    preemptions: int


class ServiceRun(msgspec.Struct, frozen=True):
    """A finished simulation: requests in the order of their ends, the time until the last one ended, the workers, and
    the share of each link's capacity that was used."""

    requests: list[RequestResult]
    duration_s: float
    workers: list[WorkerUse]
    links: Mapping[str, float]


def run_service(
    service: PlannedService,
    mode: WaitMode,
    requests: Iterable[PlannedRequests],
    seed: int = 0,
) -> ServiceRun:
    """Simulate ``requests`` in a mode until all have ended. A request that the service refuses has an ``error``."""
    return _Simulation(service, mode, iter(requests), seed).run()


class _Simulation:
    def __init__(
        self,
        service: PlannedService,
        mode: WaitMode,
        requests: Iterator[PlannedRequests],
        seed: int,
    ) -> None:
        self.service, self._mode, self._requests = service, mode, requests
        self.block_bytes, self.num_layers = service.layout.block_bytes, service.layout.num_layers
        chance = random.Random(f"planning/{seed}")
        self._errors: list[BaseException] = []
        self.world = World(chance, self._on_error, 0.0)
        self.loop = WorldLoop(self.world, "service")  # type: ignore[abstract]  # of asyncio's methods it has what is used
        self.registry = WorkerRegistry(self.world, service.router)
        self._line = WaitingLine(self.registry, service.router, self.world)
        self.workers: dict[str, _Worker] = {}
        self.pipes = _Pipes(service)
        self._links: Mapping[Any, Any] = {}
        for worker in service.workers:
            self.workers[worker.worker_id] = _Worker(self, worker)
        self._begin_heartbeats(chance)
        self.lives: dict[str, _Life] = {}  # by the ids of attempts
        self._results: list[RequestResult] = []
        self._orders = 0
        self._open = 0
        self._more = True
        self._began_s = self._last_s = self._moved_s = self.world.now()
        for failure in service.failures:
            self.loop.call_at(self._began_s + failure.at_s, self._fail, failure)

    def _on_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._errors.append(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))

    def run(self) -> ServiceRun:
        """All of it."""
        self.loop.call_soon(self._arrive_later)
        try:
            self.world.run(self._is_over, float("inf"))
        except Stuck:
            if not self._errors:
                raise
        if self._errors:
            raise self._errors[0]
        seconds = max(self._last_s - self._began_s, 1e-9)
        workers = [
            WorkerUse(
                worker.plan.worker_id,
                sum(each.engine.busy_s for each in worker.incarnations) / seconds,
                sum(each.engine.num_steps for each in worker.incarnations),
                sum(each.load.preemptions for each in worker.incarnations),
            )
            for worker in self.workers.values()
        ]
        links = {pipe.name: pipe.carried / pipe.bytes_per_s / seconds for pipe in self.pipes.by_name.values()}
        return ServiceRun(self._results, seconds, workers, links)

    def _is_over(self) -> bool:
        if self._open and self.world.now() - self._moved_s > _STANDSTILL_S:
            for life in list(self.lives.values()):
                life.end("Standstill")
        return bool(self._errors) or not (self._more or self._open)

    def _begin_heartbeats(self, chance: random.Random) -> None:
        self._note_links()
        for worker in self.workers.values():
            self._register(worker)
            self.loop.call_later(chance.uniform(0, self.service.router.heartbeat_s), self._beat, worker)

    def _note_links(self) -> None:
        """Have prefill workers links to all decode workers."""
        self._links = {
            (decode.info.worker_id, decode.info.epoch): PeerLink(decode.info.worker_id, "planned", "", 0.0)
            for decode in self.workers.values()
            if decode.plan.role is Role.DECODE
        }

    def links(self, worker: _Worker) -> Mapping[Any, Any]:
        """Those of a worker."""
        return self._links if worker.plan.role is Role.PREFILL else {}

    def _register(self, worker: _Worker) -> None:
        self.registry.add(cast(WorkerHandle, worker), worker.report(), self.links(worker))

    def _fail(self, failure: Failure) -> None:
        """A worker is lost, and its requests are tried again."""
        worker = self.workers[failure.worker_id]
        if worker.engine.is_over:
            return
        worker.engine.stop()
        self.registry.lost(failure.worker_id)
        for life in list(self.lives.values()):
            life.worker_lost(worker)
        if failure.for_s < math.inf:
            self.loop.call_later(failure.for_s, self._return, worker)

    def _return(self, lost: _Worker) -> None:
        """A worker that was lost serves again, with nothing in its pool."""
        worker = _Worker(self, lost.plan, lost)
        self.workers[lost.plan.worker_id] = worker
        self._note_links()
        self._register(worker)
        self._beat(worker)

    def _beat(self, worker: _Worker) -> None:
        if worker.engine.is_over:
            return
        worker_id, after = worker.plan.worker_id, self.registry.blocks_after(worker.plan.worker_id)
        blocks = None if after is None or not self.service.prefix_caching else worker.cached.since(after)
        self.registry.heartbeat(worker_id, worker.report(), worker.info, self.links(worker), blocks)
        self.loop.call_later(self.service.router.heartbeat_s, self._beat, worker)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _arrive_later(self) -> None:
        """Send the next conversation at its time."""
        asked = next(self._requests, None)
        if asked is None:
            self._more = False
        else:
            self.loop.call_at(self._began_s + asked.at_s, self._arrive, asked)

    def _arrive(self, asked: PlannedRequests) -> None:
        self._open += 1
        self._moved_s = self.world.now()
        if not asked.salt:
            asked = msgspec.structs.replace(asked, salt=f"own {self._orders}")
        self._send(asked, 0, ())
        self._arrive_later()

    def _send(self, asked: PlannedRequests, turn: int, before: tuple[int, ...]) -> None:
        """Send a turn, after the tokens ``before``."""
        self._orders += 1
        name, new = str(self._orders), asked.turns[turn]
        request = Request(
            name,
            before + new.token_ids,
            SamplingParams(max_tokens=new.output_len, ignore_eos=True),
            salt=asked.salt,
            attempt_id=name,
            session_id=asked.session_id,
        )
        life = _Life(self, request, self._orders, asked, turn)
        self.lives[name] = life
        self.loop.call_later(self.service.overheads.arrive_s, self.place_later, life)

    def place_later(self, life: _Life) -> None:
        """Have the router choose workers for a request."""
        self.loop.create_task(self._place(life))

    async def _place(self, life: _Life) -> None:
        """Have the router choose workers, and send the request to them."""
        request = life.request
        needs = Needs(
            self._mode,
            request.num_tokens,
            request.max_tokens,
            ticket=life.order,
            session=request.session_id,
            min_output_tokens=request.max_tokens,
        )
        prompt = self.registry.prompt(request, request.prompt_token_ids) if self.service.prefix_caching else None
        waiting = Waiting(life.order, needs, prompt=prompt, placed=self.loop.create_future())
        try:
            assignment = await self._line.wait(waiting)
        except PdserveError as error:
            life.end(type(error).__name__)
            return
        life.begin(assignment)

    def ended(self, life: _Life, result: RequestResult) -> None:
        """Note the end of a request, and send the next turn of its conversation."""
        del self.lives[life.request.attempt_id]
        self._results.append(result)
        self._last_s = self._moved_s = self.world.now()
        turns, turn = life.asked.turns, life.turn + 1
        if result.error or turn == len(turns):
            self._open -= 1
            return
        before = life.request.prompt_token_ids + (TOKEN_ID,) * result.output_tokens
        self.loop.call_later(turns[turn].pause_s, self._send, life.asked, turn, before)


class _Life:
    """A request, from its sending to its last token."""

    def __init__(
        self, simulation: _Simulation, request: Request, order: int, asked: PlannedRequests, turn: int
    ) -> None:
        self._simulation, self.request, self.order, self.asked, self.turn = simulation, request, order, asked, turn
        self._sent_s = simulation.world.now()
        self._times: list[float] = []
        self._before = 0
        """Tokens of earlier attempts."""
        self._attempts = 1
        self._workers: tuple[_Worker, ...] = ()
        self._assignment: Assignment | None = None
        self._hand_off: _HandOff | None = None

    def begin(self, assignment: Assignment) -> None:
        """Send it to its workers."""
        simulation, request = self._simulation, self.request
        self._assignment = assignment
        prefill = simulation.workers[assignment.prefill.worker.worker_id]
        decode = None if assignment.decode is None else simulation.workers[assignment.decode.worker.worker_id]
        self._workers = (prefill,) if decode is None else (prefill, decode)
        after_s = simulation.service.overheads.dispatch_s
        alone = decode is None or request.max_tokens == 1
        role = KVRole.LOCAL if alone else KVRole.PUSH
        simulation.loop.call_later(after_s, prefill.engine.take, Submit(request, role))
        if decode is not None and not alone:
            self._hand_off = _HandOff(simulation, request, prefill, decode)
            simulation.loop.call_later(after_s, decode.engine.take, Submit(request, KVRole.RECEIVE))
        for worker in self._workers:
            if worker.engine.is_over:  # it was lost meanwhile
                self.worker_lost(worker)

    def worker_lost(self, worker: _Worker) -> None:
        """If it runs on a worker that is lost, try it again, after its tokens so far."""
        if worker not in self._workers:
            return
        assert self._assignment is not None, "it has workers"
        simulation, lost = self._simulation, self.request
        self._assignment.end()
        if self._hand_off is not None:
            self._hand_off.is_over = True
        for other in self._workers:
            simulation.loop.call_later(
                simulation.service.overheads.dispatch_s, other.engine.take, Abort(lost.attempt_id)
            )
        self._assignment, self._hand_off, self._workers = None, None, ()
        self._before, self._attempts = len(self._times), self._attempts + 1
        del simulation.lives[lost.attempt_id]
        self.request = lost.attempt(f"{lost.request_id}#{self._attempts}", (TOKEN_ID,) * self._before, 0.0)
        simulation.lives[self.request.attempt_id] = self
        simulation.loop.call_later(RETRY_PAUSE_S, simulation.place_later, self)

    def reserved(self, event: Reserved) -> None:
        """Decode has allocated its blocks."""
        if self._hand_off is not None:
            self._hand_off.reserved(event)

    def progressed(self, progress: Progress) -> None:
        """Prefill has computed a part."""
        if self._hand_off is not None:
            self._hand_off.progressed(progress)

    def token(self, is_last: bool) -> None:
        """A token was sampled."""
        self._times.append(self._simulation.world.now() + self._simulation.service.overheads.answer_s)
        assert self._assignment is not None, "it was sent to workers"
        prefill, decode = self._assignment.prefill, self._assignment.decode
        if decode is None or self._hand_off is None:
            prefill.prefilled()
            prefill.token_made()
        elif len(self._times) == self._before + 1:
            prefill.prefilled()
            prefill.token_made()
            prefill.end()
            return  # it ends on decode
        else:
            decode.token_made()
        if is_last:
            self.end("")

    def end(self, error: str) -> None:
        """Report it."""
        if self._assignment is not None:
            self._assignment.end()
        times, sent_s, prompt_tokens = self._times, self._sent_s, len(self.request.prompt_token_ids)
        result = RequestResult(sent_s, prompt_tokens, len(times), error=error, attempts=self._attempts)
        if not error:
            hand_off = self._hand_off
            result = RequestResult(
                sent_s,
                prompt_tokens,
                len(times),
                times[0] - sent_s,
                times[1] - sent_s if len(times) > 1 else -1.0,
                times[-1] - sent_s,
                -1.0 if hand_off is None else hand_off.exposed_s,
                0 if hand_off is None else hand_off.num_blocks,
                tuple([after - before for before, after in itertools.pairwise(times)]),
                attempts=self._attempts,
            )
        self._simulation.ended(self, result)


class _HandOff:
    """The KV of a request on its way. Bytes are sent once prefill has computed them and decode has said where they
    go."""

    def __init__(self, simulation: _Simulation, request: Request, prefill: _Worker, decode: _Worker) -> None:
        self._simulation, self._request, self._prefill, self._decode = simulation, request, prefill, decode
        self._block_bytes, self._num_layers = simulation.block_bytes, simulation.num_layers
        pipes, self._link = simulation.pipes.between(prefill.plan, decode.plan)
        self._flow = Flow(simulation.loop, pipes, self._drained, self._link.most_bytes_per_s)
        self._announced = False
        self.is_over = False
        """The attempt has ended."""
        self._skipped = 0
        self.num_blocks = 0
        """That have to be sent."""
        self._ready_bytes = self._whole_bytes = 0.0
        self._sent_bytes = 0.0
        self._computed_s = -1.0
        """When all was computed."""
        self.exposed_s = -1.0

    def reserved(self, event: Reserved) -> None:
        """Decode has allocated blocks, of which it need not get those that it has cached."""
        self._skipped = event.num_cached_blocks
        self.num_blocks = len(event.block_ids) - self._skipped
        after_s = self._simulation.service.overheads.announce_s + self._link.latency_s
        self._simulation.loop.call_later(after_s, self._announce)

    def _announce(self) -> None:
        self._announced = True
        self._pump()

    def progressed(self, progress: Progress) -> None:
        """Prefill has computed KV."""
        layout = self._simulation.service.layout
        total, tokens = self._request.num_tokens, progress.num_computed_tokens
        blocks = layout.blocks_for(tokens) if tokens >= total else tokens // layout.block_size
        ready = float(blocks * self._block_bytes)
        if progress.num_layers:  # the blocks before this step are there as a whole
            whole = self._whole_bytes
            ready = whole + (ready - whole) * progress.num_layers / self._num_layers
        else:
            self._whole_bytes = ready
            if tokens >= total:
                self._computed_s = self._simulation.world.now()
        self._ready_bytes = max(self._ready_bytes, ready)
        self._pump()

    def _pump(self) -> None:
        """Send what is ready."""
        if not self._announced or self.is_over:
            return
        ready = self._ready_bytes - self._skipped * self._block_bytes
        if ready > self._sent_bytes:
            num_bytes, self._sent_bytes = ready - self._sent_bytes, ready
            self._flow.add(num_bytes)
            self._prefill.engine.occupy(num_bytes / self._link.sender_bytes_per_s)
            self._decode.engine.occupy(num_bytes / self._link.receiver_bytes_per_s)
        elif self._computed_s >= 0 and not self._flow.is_busy:
            self._drained()

    def _drained(self) -> None:
        """All that was sent has arrived."""
        if self._computed_s < 0 or self.exposed_s >= 0 or self.is_over:
            return
        after_s = self._link.latency_s + self._simulation.service.overheads.handoff_s
        self.exposed_s = self._simulation.world.now() + after_s - self._computed_s
        self._simulation.loop.call_later(after_s, self._arrived)

    def _arrived(self) -> None:
        """Decode goes on, and prefill frees its blocks."""
        if self.is_over:
            return
        attempt_id = self._request.attempt_id
        self._decode.engine.take(KVReady(attempt_id, TOKEN_ID))
        self._simulation.loop.call_later(self._link.latency_s, self._prefill.engine.take, Release(attempt_id))


class _Pipes:
    """The links of a service."""

    def __init__(self, service: PlannedService) -> None:
        self._service = service
        self.by_name: dict[str, Pipe] = {}

    def between(self, source: PlannedWorker, target: PlannedWorker) -> tuple[list[Pipe], LinkClass]:
        """The links from one worker to another, and what kind they are as a whole."""
        service = self._service
        if source.host == target.host or service.between is None:
            link = service.within
            pipes = [self._pipe(f"{source.worker_id} out", link), self._pipe(f"{target.worker_id} in", link)]
        else:
            link = service.between
            pipes = [self._pipe(f"{source.host} out", link), self._pipe(f"{target.host} in", link)]
        if service.shared is not None:
            pipes.append(self._pipe("shared", service.shared))
            shared = service.shared
            link = LinkClass(
                shared.bytes_per_s,
                link.latency_s + shared.latency_s,
                min(link.most_bytes_per_s, shared.most_bytes_per_s),
                min(link.sender_bytes_per_s, shared.sender_bytes_per_s),
                min(link.receiver_bytes_per_s, shared.receiver_bytes_per_s),
            )
        return pipes, link

    def _pipe(self, name: str, link: LinkClass) -> Pipe:
        if name not in self.by_name:
            self.by_name[name] = Pipe(name, link.bytes_per_s)
        return self.by_name[name]


class _Worker:
    """A worker of the service: what its engine sends reaches the requests. It may stand for one that was ``lost``."""

    def __init__(self, simulation: _Simulation, plan: PlannedWorker, lost: _Worker | None = None) -> None:
        self._simulation, self.plan = simulation, plan
        self.incarnations: list[_Worker] = [*(() if lost is None else lost.incarnations), self]
        """Those that were lost, and this one."""
        service = simulation.service
        self.engine = PlannedEngine(
            simulation.loop,
            SchedulerConfig(
                max_num_batched_tokens=plan.token_budget,
                max_num_seqs=plan.max_num_seqs,
                max_model_len=service.max_model_len,
                block_size=service.layout.block_size,
                num_blocks=plan.num_blocks,
                prefix_caching=service.prefix_caching,
                chunk_tokens=plan.chunk_tokens,
            ),
            plan.steps,
            self,
            service.layout,
            layer_groups=service.layer_groups,
            between_s=service.overheads.between_s,
            run_ahead=plan.run_ahead,
            spread=plan.spread,
        )
        self.load = Load(plan.num_blocks, 0, 0, 0)
        self.cached = CachedBlocks()
        self.info = WorkerInfo(
            worker_id=plan.worker_id,
            role=plan.role,
            epoch=f"{plan.worker_id}/{len(self.incarnations)}",
            control_address="",
            kv_endpoints=(),
            node=plan.host,
            device="planned",
            pid=0,
            engine_pid=0,
            layout=service.layout,
            dtype=service.layout.dtype,
            num_blocks=plan.num_blocks,
            max_model_len=service.max_model_len,
            max_num_batched_tokens=plan.token_budget,
            vocab_size=0,
            cuda_visible_devices="",
            cores="",
            version="",
            engine_restarts=0,
            ready=True,
            max_num_seqs=plan.max_num_seqs,
        )

    def report(self) -> WorkerLoad:
        """Its load, as a heartbeat has it."""
        load = self.load
        return WorkerLoad(
            load.free_blocks,
            load.running,
            load.waiting,
            load.preemptions,
            load.prompt_tokens_looked_up,
            load.prompt_tokens_cached,
            load.cached_blocks,
        )

    def send(self, *events: EngineEvent) -> None:
        """See `engine.core.Outbox`."""
        lives = self._simulation.lives
        for event in events:
            if isinstance(event, Step):
                for token in event.tokens:
                    if (life := lives.get(token.attempt_id)) is not None:
                        life.token(bool(token.finish_reason))
            elif isinstance(event, Load):
                self.load = event
            elif isinstance(event, CacheChanged):
                self.cached.change(event.added, event.removed)
            elif isinstance(event, Rejected):
                lives[event.attempt_id].end(event.kind)
            elif isinstance(event, Finished):
                lives[event.attempt_id].end("")

    def send_kv(self, *events: KVEvent) -> None:
        """See `engine.core.Outbox`."""
        lives = self._simulation.lives
        for event in events:
            if isinstance(event, Reserved):
                if (life := lives.get(event.attempt_id)) is not None:
                    life.reserved(event)
            elif isinstance(event, Computed):
                for progress in event.progress:
                    if (life := lives.get(progress.attempt_id)) is not None:
                        life.progressed(progress)
