"""A server with an engine that is not pdserve's, as a worker of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec

from external_engines.adapter import Adapter, HandOff, KVCounters, Step, lacking
from external_engines.answers import TIMEOUT, asked_logprobs, headers_of, object_of, refusal, step_of, steps_of
from pdserve.core.clock import Clock
from pdserve.core.errors import (
    InvalidRequest,
    PdserveError,
    TransferError,
    TransferRefused,
    WorkerLost,
)
from pdserve.core.handoff import KVPeer, PrefixSource, TransferProof
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import ClockOffset, Event, EventKind
from pdserve.core.worker import OutputSink, TokenOutput, WorkerInfo

log = logging.getLogger(__name__)


class _HandedOff(msgspec.Struct, frozen=True):
    """What decode has to know of prefill's answer (`pdserve.core.worker.TokenOutput.hand_off`): token 1, and the
    hand-off in the engine's words (None: token 1 has ended the request, or decode had it from `Adapter.meeting`)."""

    token_1: int
    hand_off: HandOff | None


_HANDED_OFF = msgspec.json.Decoder(_HandedOff)


class EngineWorker:
    """A server as `contract.control.WorkerHandle`. Its requests are HTTP calls of the event loop that it is used on:
    the gateway's, or that of the process that has started the server (`external_engines.started`). Events are on the
    ``clock`` of that process.

    Token 1 comes from prefill. Decode repeats it, and goes on with token 2; if it repeats another one, the hand-off has
    failed, because the client has token 1 already."""

    def __init__(
        self,
        info: WorkerInfo,
        model: str,
        adapter: Adapter,
        http: httpx2.AsyncClient,
        clock: Clock,
    ) -> None:
        self.info = info
        self.clock = ClockOffset(0.0, 0.0)
        self.handed_off_tokens = 0
        """Prompt tokens of the hand-offs that it has received, which its engine should not have computed."""
        self._name = f"worker {info.worker_id} ({adapter.kind})"
        self._model = model
        self._adapter = adapter
        self._http = http
        self._hand_offs: dict[str, asyncio.Future[_HandedOff]] = {}  # those that decodes wait for, by attempt
        self._time = clock
        self._sinks: dict[str, OutputSink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not self._tasks

    # --- WorkerHandle ------------------------------------------------------------------------------------------------

    def run(self, request: Request, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """See `contract.control.WorkerHandle`."""
        self._begin(request, sink, self._run(request))

    def push(self, request: Request, peer: KVPeer, sink: OutputSink, prefix_source: PrefixSource | None = None) -> None:
        """See `contract.control.WorkerHandle`."""
        self._begin(request, sink, self._push(request))

    def receive(self, request: Request, peer: KVPeer, sink: OutputSink, tell_ready: bool = False) -> None:
        """See `contract.control.WorkerHandle`."""
        meeting = self._adapter.meeting(request.attempt_id, peer.endpoints[0].address)
        self._begin(request, sink, self._receive(request, meeting, tell_ready))
        if request.attempt_id in self._tasks:
            self._hand_offs[request.attempt_id] = asyncio.get_running_loop().create_future()

    def hand_over(self, attempt_id: str, hand_off: bytes) -> None:
        """See `contract.control.WorkerHandle`."""
        if (waiting := self._hand_offs.get(attempt_id)) is not None and not waiting.done():
            waiting.set_result(_HANDED_OFF.decode(hand_off))

    def send_prefix(self, request: Request, peer: KVPeer, sink: OutputSink) -> None:
        """Fail: servers of other engines send no prefix."""
        sink.failed(TransferRefused(f"{self.info.worker_id}: {self._adapter.kind} sends no prefix"))

    def forget(self, attempt_id: str) -> None:
        """See `contract.control.WorkerHandle`."""
        self._sinks.pop(attempt_id, None)

    async def abort(self, attempt_id: str) -> None:
        """See `contract.control.WorkerHandle`. The server notices that the call is closed."""
        self._sinks.pop(attempt_id, None)
        if (task := self._tasks.get(attempt_id)) is not None:
            task.cancel()
            await asyncio.wait([task])

    def request_heartbeat(self) -> None:
        """Nothing: `external_engines.directory` asks by itself."""

    async def wait_closed(self) -> None:
        """See `contract.control.WorkerHandle`."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """End all calls. Their requests fail with `WorkerLost`."""
        for attempt_id in list(self._sinks):
            self._fail(attempt_id, WorkerLost(f"worker {self.info.worker_id} is lost: the gateway closed its calls"))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._closed.set()

    # --- one request -------------------------------------------------------------------------------------------------

    async def _run(self, request: Request) -> None:
        events: tuple[Event, ...] | None = None
        async with aclosing(self._stream(request, self._adapter.alone(request, self._model))) as steps:
            async for step in steps:
                if step.tokens:
                    events = () if events is not None else (self._event(EventKind.PREFILL_ANSWERED),)
                self._give(request, step, events or ())

    async def _push(self, request: Request) -> None:
        """Prefill, and tell decode where the KV is, unless it knows, or token 1 ends the request."""
        meeting = self._adapter.meeting(request.attempt_id, self.info.kv_endpoints[0].address)
        answer = await self._answer(request, self._adapter.prefill(request, self._model, meeting))
        events = (self._event(EventKind.PREFILL_ANSWERED),)
        step = step_of(self._adapter, answer, self._name)
        if len(step.tokens) != 1:
            raise WorkerLost(f"worker {self.info.worker_id} answered a prefill with {len(step.tokens)} tokens")
        token_1 = step.tokens[0][0]
        if meeting is not None:
            step, hand_off = step._replace(finish_reason=self._end_of(request, token_1)), None
        elif step.finish_reason is FinishReason.STOP:
            hand_off = None
        else:
            step, hand_off = step._replace(finish_reason=None), self._adapter.hand_off(answer)
        self._give(request, step, events, hand_off=msgspec.json.encode(_HandedOff(token_1, hand_off)))

    def _end_of(self, request: Request, token_id: int) -> FinishReason | None:
        """Whether token 1 ends the request, which decode says, too, but later."""
        sampling = request.sampling
        stops = () if sampling.ignore_eos else self.info.eos_token_ids
        if token_id in (*stops, *sampling.stop_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.max_tokens == 1 else None

    async def _receive(self, request: Request, meeting: HandOff | None, tell_ready: bool) -> None:
        """Have decode fetch the KV, after prefill's answer unless there is a ``meeting``, and give what follows
        token 1."""
        # The counters are those of all requests, so they prove the hand-off of one that runs alone.
        before = None if len(self._tasks) > 1 else asyncio.create_task(self._count())
        prefilled = self._hand_offs[request.attempt_id]
        hand_off = (await prefilled).hand_off if meeting is None else meeting
        if hand_off is None:
            self._output(request, TokenOutput(None, FinishReason.STOP))
            return
        repeated = False
        try:
            decoded = self._decoded(request, prefilled, hand_off, tell_ready, before)
            async with aclosing(decoded) as outputs:
                async for step, events, proof in outputs:
                    repeated = True
                    self._give(request, step, events, proof)
        except WorkerLost as error:
            if repeated:
                raise
            # Engines do not tell why a request failed.
            raise TransferError(f"{error}, before token 2: it may have failed to fetch the KV") from None

    async def _decoded(
        self,
        request: Request,
        prefilled: asyncio.Future[_HandedOff],
        hand_off: HandOff,
        tell_ready: bool,
        before: asyncio.Task[KVCounters | None] | None,
    ) -> AsyncGenerator[tuple[Step, tuple[Event, ...], TransferProof | None], None]:
        """What decode gives after token 1, with the events of the hand-off at first, and its proof at last.
        ``prefilled`` has prefill's token 1, and ``before`` reads the counters before the hand-off."""
        events: tuple[Event, ...] = (self._event(EventKind.DECODE_SENT),) if prefilled.done() else ()
        after: asyncio.Task[KVCounters | None] | None = None
        repeated = False
        async with aclosing(self._stream(request, self._adapter.decode(request, self._model, hand_off))) as steps:
            async for step in steps:
                if step.tokens and not repeated:
                    repeated = True
                    events += (self._event(EventKind.DECODE_ANSWERED),)
                    self.handed_off_tokens += request.num_tokens
                    token_1 = (await prefilled).token_1
                    if (token_id := step.tokens[0][0]) != token_1:
                        raise TransferError(
                            f"worker {self.info.worker_id} decodes another token 1 ({token_id}) than prefill "
                            f"({token_1}): it has other KV, or another order of computing in its batch"
                        )
                    step = step._replace(tokens=step.tokens[1:])
                    if tell_ready:
                        events += (self._event(EventKind.DECODE_READY),)
                        self._output(request, TokenOutput(None, events=events))
                ended = step.finish_reason is not None
                if not (step.tokens or ended):
                    continue
                proof = self._proof(request, await before, await after) if ended and before and after else None
                yield step, events, proof
                events = ()
                if before and not after:  # token 2 does not wait for it, because its latency is measured
                    after = asyncio.create_task(self._count())

    async def _count(self) -> KVCounters | None:
        """The server's counters; None if it does not tell them."""
        with contextlib.suppress(httpx2.HTTPError):
            return (await self._adapter.load(self._http, self.info.num_blocks))[1]
        return None

    def _proof(self, request: Request, before: KVCounters | None, after: KVCounters | None) -> TransferProof | None:
        """The proof of a hand-off, of which the counters say what was moved; None if they have counted something else,
        too, or count no bytes."""
        if before is None or after is None or (moved := after.since(before)).tokens != request.num_tokens:
            return None
        if moved.received and not moved.received_bytes:
            return None
        layout = self.info.layout
        return TransferProof(
            transport=self._adapter.transport,
            kv_bytes=moved.received_bytes,
            kv_bytes_retried=0,
            blocks_received=moved.received_bytes // layout.block_bytes,
            blocks_skipped=moved.cached // layout.block_size,
            messages=0,
            checksum=f"counted by {self._adapter.kind}",
            export_ms=0.0,
            wire_ms=moved.wire_ms,
            import_ms=0.0,
            span_ms=0.0,
            request_to_ready_ms=0.0,
            ceiling_gbs=0.0,
            wire_bytes=moved.received_bytes,
        )

    def _give(
        self,
        request: Request,
        step: Step,
        events: tuple[Event, ...],
        proof: TransferProof | None = None,
        hand_off: bytes = b"",
    ) -> None:
        """Give the tokens of a step to the request's sink, and ``proof`` with the last one."""
        if not step.tokens and step.finish_reason is not None:  # the router asks for a token with it
            self._output(request, TokenOutput(None, step.finish_reason))
        for number, (token_id, logprobs) in enumerate(step.tokens, 1):
            reason, proven = (step.finish_reason, proof) if number == len(step.tokens) else (None, None)
            cached = step.cached_tokens or 0
            asked = asked_logprobs(logprobs, request)
            output = TokenOutput(token_id, reason, events, proven, asked, cached, hand_off=hand_off)
            self._output(request, output)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(
            self._adapter.path,
            content=msgspec.json.encode(body),
            headers=headers_of(request.attempt_id),
            timeout=TIMEOUT,
        )
        if answer.status_code != 200:
            raise refusal(self._name, answer.status_code, answer.text, answer.headers)
        return object_of(answer.content, self._name)

    def _stream(self, request: Request, body: dict[str, Any]) -> AsyncGenerator[Step, None]:
        return steps_of(self._http, self._adapter, body, request.attempt_id, self._name)

    # --- plumbing ----------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, sink: OutputSink, work: Coroutine[Any, Any, None]) -> None:
        attempt_id = request.attempt_id
        if self._closed.is_set():
            work.close()
            sink.failed(WorkerLost(f"worker {self.info.worker_id} is lost"))
        elif lacks := lacking(self._adapter.abilities, request):
            work.close()
            sink.failed(InvalidRequest(lacks))
        else:
            self._sinks[attempt_id] = sink
            task = self._tasks[attempt_id] = asyncio.create_task(self._finish(attempt_id, work))
            task.add_done_callback(lambda _: self._tasks.pop(attempt_id, None))

    async def _finish(self, attempt_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Do the ``work``; what ends it goes to the sink."""
        try:
            await work
        except PdserveError as error:
            self._fail(attempt_id, error)
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            self._fail(attempt_id, WorkerLost(f"worker {self.info.worker_id} is lost: {what}"))
        except Exception as error:
            log.exception("unexpected error in a call of worker %s", self.info.worker_id)
            self._fail(attempt_id, WorkerLost(f"worker {self.info.worker_id}: {type(error).__name__}: {error}"))
        finally:
            self._sinks.pop(attempt_id, None)
            self._hand_offs.pop(attempt_id, None)

    def _output(self, request: Request, output: TokenOutput) -> None:
        if (sink := self._sinks.get(request.attempt_id)) is not None:
            sink.output(output)

    def _fail(self, attempt_id: str, error: PdserveError) -> None:
        if (sink := self._sinks.pop(attempt_id, None)) is not None:
            sink.failed(error)

    def _event(self, kind: EventKind) -> Event:
        return Event(kind, self.info.worker_id, self._time.now())
