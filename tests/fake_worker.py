"""A worker without an engine, for tests of the router and the gateway: scripted tokens, delays, failures, deaths."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import PdserveError, WorkerLost
from pdserve.core.handoff import KVEndpoint, KVPeer, PeerLink, PrefixSource, TransferProof
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.timeline import ClockOffset, Event, EventKind
from pdserve.core.worker import Links, OutputSink, Role, TokenOutput, WorkerInfo

Point = Literal[
    "connect_peer", "room", "prefill", "decode", "decode_step", "decode_more", "run", "run_more", "abort",
    "send_prefix",
]  # fmt: skip
Call = Literal["push", "receive", "run", "send_prefix"]
T = TypeVar("T")

FAKE_LAYOUT = KVLayout.uniform("fake", "float32", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)


def fake_info(worker_id: str, role: Role, *, epoch: str = "1", layout: KVLayout = FAKE_LAYOUT) -> WorkerInfo:
    """What a small fake worker says of itself."""
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        control_address=f"fake:{worker_id}",
        kv_endpoints=(KVEndpoint("loopback", worker_id),),
        node="fake",
        device="cpu",
        pid=1,
        engine_pid=2,
        layout=layout,
        dtype=layout.dtype,
        num_blocks=64,
        max_model_len=256,
        max_num_batched_tokens=512,
        vocab_size=1000,
        cuda_visible_devices="",
        cores="0",
        version="0",
        engine_restarts=0,
        ready=True,
        life=f"{worker_id}/{epoch}",
    )


def count_up(token_ids: Sequence[int]) -> int:
    """The default 'model': the next token is the last plus one, whoever computes it."""
    return (token_ids[-1] + 1) % 1000


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
    """As if all tokens were equally likely."""
    if (count := request.sampling.prompt_logprobs) is None:
        return ()
    logprob = math.log(1 / 1000)
    top = tuple((token_id, logprob) for token_id in range(count))
    return tuple(TokenLogprobs(logprob, top) for _ in request.prompt_token_ids[1:])


@dataclass(slots=True)
class _Held:
    """A request on the worker: its tokens so far, how many are wanted, and whether its KV has come."""

    token_ids: list[int]
    max_tokens: int
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


def fake_link(worker_id: str) -> PeerLink:
    """What a worker says of its link to this one."""
    return PeerLink(worker_id, "loopback", "it is a fake", 0.0)


def fake_links(*worker_ids: str, epoch: str = "1") -> Links:
    """What a worker says that is linked to these, all of the same epoch."""
    return {(worker_id, epoch): fake_link(worker_id) for worker_id in worker_ids}


class FakeWorker:
    """Satisfies `contract.control.WorkerHandle`. Workers that share a ``fleet`` hand requests over to each other.

    ``delay_s`` and ``failures`` are keyed by point: ``room``, ``prefill``, ``decode`` and ``run`` come before the
    first token there, ``decode_more`` and ``run_more`` before each later one. ``hangs`` are points never passed,
    ``stuck`` those of them that a request has reached. ``held`` names the requests on it, ``aborted`` those it was told
    to drop, ``requests`` all it was sent. It finds ``cached_tokens`` of every prompt in its cache. ``change_output``
    has the last word on each output.
    """

    def __init__(
        self,
        info: WorkerInfo,
        fleet: dict[str, FakeWorker],
        *,
        clock: Clock | None = None,
        next_token: Callable[[Sequence[int]], int] = count_up,
        eos_token_id: int | None = None,
    ) -> None:
        self.info = info
        self.clock = ClockOffset(0.0, 0.0)
        self.fleet = fleet
        self.delay_s: dict[Point, float] = {}
        self.failures: dict[Point, deque[PdserveError]] = {}
        self.hangs: set[Point] = set()
        self.stuck: set[Point] = set()
        self.held: dict[str, _Held] = {}
        self.aborted: list[str] = []
        self.requests: list[tuple[Call, Request]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._feeding: dict[str, asyncio.Task[None]] = {}
        self.cached_tokens = 0
        self.prefix_sources: list[PrefixSource | None] = []  # of all requests that it computed
        self.connected: set[str] = set()
        self.on_request_heartbeat: Callable[[], object] = lambda: None
        self.change_output: Callable[[TokenOutput], TokenOutput] = lambda output: output
        self._time = clock or MonotonicClock()
        self._next_token = next_token
        self.eos_token_id = eos_token_id
        self._dead = asyncio.Event()
        fleet[info.worker_id] = self

    # --- the script --------------------------------------------------------------------------------------------------

    def fail(self, point: Point, *errors: PdserveError) -> None:
        """Raise these, one per visit of ``point``, then behave again."""
        self.failures.setdefault(point, deque()).extend(errors)

    def crash(self) -> None:
        """Die: whatever waits here, now or later, raises `WorkerLost`."""
        self._dead.set()
        self.held.clear()

    @property
    def is_dead(self) -> bool:
        """Whether it has crashed or was closed."""
        return self._dead.is_set()

    # --- its KV end --------------------------------------------------------------------------------------------------

    async def connect_peer(self, peer: KVPeer) -> None:
        """Compare layouts as real workers do."""
        self.connected.discard(peer.worker_id)
        await self._pass("connect_peer")
        self.info.layout.check_source(self.fleet[peer.worker_id].info.layout)
        self.connected.add(peer.worker_id)

    def open_links(self) -> list[PeerLink]:
        """The links it has."""
        return [fake_link(worker_id) for worker_id in sorted(self.connected)]

    # --- WorkerHandle ------------------------------------------------------------------------------------------------

    def request_heartbeat(self) -> None:
        """Tell the test."""
        self.on_request_heartbeat()

    def push(self, request: Request, peer: KVPeer, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """One token; the peer then goes on, once it has room."""
        self.prefix_sources.append(prefix_source)
        self._feed(request, self._push(request, peer), sink)

    def receive(self, request: Request, peer: KVPeer, sink: OutputSink, tell_ready: bool = False) -> None:
        """Token 2 and on; nothing is ever skipped."""
        self._feed(request, self._receive(request, peer, tell_ready), sink)

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """Nothing: the workers of a fleet tell each other."""

    def send_prefix(self, request: Request, peer: KVPeer, sink: OutputSink) -> None:
        """Nothing but an end."""
        self._feed(request, self._send_prefix(request), sink)

    def run(self, request: Request, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """All tokens."""
        self.prefix_sources.append(prefix_source)
        self._feed(request, self._run(request), sink)

    def _feed(self, request: Request, outputs: AsyncIterator[TokenOutput], sink: OutputSink) -> None:
        async def feed() -> None:
            try:
                async for output in outputs:
                    sink.output(self.change_output(output))
            except PdserveError as error:
                sink.failed(error)

        task = self._feeding[request.attempt_id] = self._spawn(feed())
        task.add_done_callback(lambda _: self._feeding.pop(request.attempt_id, None))

    async def _receive(self, request: Request, peer: KVPeer, tell_ready: bool) -> AsyncIterator[TokenOutput]:
        self.requests.append(("receive", request))
        held = self.held[request.attempt_id] = _Held(list(request.token_ids), request.max_tokens)
        await self._pass("room")
        room = self._event(EventKind.ROOM_MADE)
        held.has_room.set()
        await self._live(held.arrived.wait())
        await self._pass("decode")
        verified = self._event(EventKind.KV_VERIFIED)
        proof = self._proof(len(held.token_ids) - 1)
        if held.ended:
            self.held.pop(request.attempt_id, None)
            yield TokenOutput(None, FinishReason.STOP, (room, verified), proof)
            return
        if tell_ready:
            yield TokenOutput(None, None, (self._event(EventKind.DECODE_READY),))
        await self._pass("decode_step")
        scheduled = self._event(EventKind.DECODE_SCHEDULED)
        first = True
        while True:
            token_id, reason = self._step(held)
            if reason is not None:
                self.held.pop(request.attempt_id, None)
            if first:
                events = (room, verified, scheduled, self._event(EventKind.TOKEN_2_SAMPLED))
                yield TokenOutput(token_id, reason, events, proof)
                first = False
            else:
                yield TokenOutput(token_id, reason)
            if reason is not None:
                return
            await self._pass("decode_more")

    async def _send_prefix(self, request: Request) -> AsyncIterator[TokenOutput]:
        self.requests.append(("send_prefix", request))
        await self._pass("send_prefix")
        yield TokenOutput(None, FinishReason.STOP)

    async def _push(self, request: Request, peer: KVPeer) -> AsyncIterator[TokenOutput]:
        self.requests.append(("push", request))
        received = self._event(EventKind.PREFILL_RECEIVED)
        held = self.held[request.attempt_id] = _Held(list(request.token_ids), request.max_tokens)
        scheduled = self._event(EventKind.PREFILL_SCHEDULED)
        await self._pass("prefill")
        token_id, reason = self._step(held)
        sampled = self._event(EventKind.TOKEN_1_SAMPLED)
        ends_here = reason is FinishReason.STOP
        self._spawn(self._hand_over(request.attempt_id, self.fleet[peer.worker_id], token_id, ends_here))
        yield TokenOutput(
            token_id,
            reason if ends_here else None,
            (received, scheduled, sampled),
            cached_tokens=self.cached_tokens,
            prompt_logprobs=_prompt_logprobs(request),
        )
        await self._live(asyncio.Event().wait())  # until `forget` or `abort`

    async def _run(self, request: Request) -> AsyncIterator[TokenOutput]:
        self.requests.append(("run", request))
        received = self._event(EventKind.PREFILL_RECEIVED)
        held = self.held[request.attempt_id] = _Held(list(request.token_ids), request.max_tokens)
        before = self._event(EventKind.PREFILL_SCHEDULED)
        await self._pass("run")
        kinds = [EventKind.TOKEN_1_SAMPLED, EventKind.TOKEN_2_SAMPLED]
        events: tuple[Event, ...] = (received, before)
        while True:
            token_id, reason = self._step(held)
            if reason is not None:
                self.held.pop(request.attempt_id, None)
            if kinds:
                events = (*events, self._event(kinds.pop(0)))
            output = TokenOutput(token_id, reason, events)
            if len(kinds) == 1:
                told = _prompt_logprobs(request)
                output = msgspec.structs.replace(output, cached_tokens=self.cached_tokens, prompt_logprobs=told)
            yield output
            if reason is not None:
                return
            await self._pass("run_more")
            events = (self._event(EventKind.DECODE_SCHEDULED),) if kinds else ()

    def forget(self, attempt_id: str) -> None:
        """Its sink gets nothing more."""
        if (feeding := self._feeding.pop(attempt_id, None)) is not None:
            feeding.cancel()

    async def abort(self, attempt_id: str) -> None:
        """Drop the request."""
        self.aborted.append(attempt_id)
        self.forget(attempt_id)
        self.held.pop(attempt_id, None)
        if not self._dead.is_set():
            await self._pass("abort")

    async def wait_closed(self) -> None:
        """Return once it is dead."""
        await self._dead.wait()

    async def aclose(self) -> None:
        """Die quietly."""
        self.crash()

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _hand_over(self, attempt_id: str, peer: FakeWorker, token_id: int, ended: bool) -> None:
        """Hold the request until the peer has room for it, or one of both gives it up."""
        while attempt_id in self.held and not (self.is_dead or peer.is_dead):
            held = peer.held.get(attempt_id)
            if held is not None and held.has_room.is_set():
                held.token_ids.append(token_id)
                held.max_tokens -= 1
                held.ended = ended
                held.arrived.set()
                break
            await asyncio.sleep(0.001)
        self.held.pop(attempt_id, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _step(self, held: _Held) -> tuple[int, FinishReason | None]:
        token_id = self._next_token(held.token_ids)
        held.token_ids.append(token_id)
        held.max_tokens -= 1
        if token_id == self.eos_token_id:
            return token_id, FinishReason.STOP
        return token_id, FinishReason.LENGTH if held.max_tokens == 0 else None

    def _event(self, kind: EventKind) -> Event:
        return Event(kind, self.info.worker_id, self._time.now())

    def _proof(self, prompt_tokens: int) -> TransferProof:
        layout = self.info.layout
        blocks = layout.blocks_for(prompt_tokens)
        kv_bytes = layout.expected_bytes(prompt_tokens)
        return TransferProof("loopback", kv_bytes, 0, blocks, 0, 1, "off", 0.1, 0.1, 0.1, 0.2, 0.3, 0.0, kv_bytes)

    async def _pass(self, point: Point) -> None:
        if self.delay_s.get(point):
            await self._live(asyncio.sleep(self.delay_s[point]))
        if point in self.hangs:
            self.stuck.add(point)
            await self._live(asyncio.Event().wait())
        if self.failures.get(point):
            raise self.failures[point].popleft()
        if self._dead.is_set():
            raise WorkerLost(f"worker {self.info.worker_id} is lost: it crashed")

    async def _live(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, unless the worker dies first."""
        task, dead = asyncio.create_task(coroutine), asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise WorkerLost(f"worker {self.info.worker_id} is lost: it crashed")
            return await task
        finally:
            task.cancel()
            dead.cancel()
