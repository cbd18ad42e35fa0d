"""One attempt to serve a request on its workers: calls, merging of their streams, and clean-up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator
from types import TracebackType

from contract.control import WorkerHandle
from pdserve.core.clock import Clock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, NotReady, PdserveError, TransferError, WorkerLost
from pdserve.core.handoff import PrefixFetch, PrefixSource, prefix_transfer_id
from pdserve.core.request import Mode
from pdserve.core.timeline import GATEWAY, Event, EventKind
from pdserve.core.worker import TokenOutput
from router.arrivals import Arrivals
from router.cost_model import Served
from router.measure import Measure
from router.prefix_fetch import SOURCE_TIMEOUT_S
from router.registered_worker import RegisteredWorker, Share
from router.registry import Assignment, WorkerRegistry
from router.session import RoutedToken, RoutingResult, Session
from router.worker_stream import Arrival, WorkerStream

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0  # after this, the blocks of a worker that does not answer are freed by their leases
PROOF_TIMEOUT_S = 10.0
"""How long to wait for the proof of a hand-off after the last token."""
STANDSTILL_S = 2.0
"""Limit: wait of both workers of a hand-off for blocks that only hand-offs free; twice that after token 1. Then: retry.

Workers get requests in different orders (from several gateways, by priority, when some are retried). Then each of two
may hold blocks for hand-offs for which the other one has none."""

# A retry after token 1 gets token 2 from a prefill, whose events replace those of decode.
_AS_TOKEN_2 = {
    EventKind.PREFILL_SCHEDULED: EventKind.DECODE_SCHEDULED,
    EventKind.TOKEN_1_SAMPLED: EventKind.TOKEN_2_SAMPLED,
}


class Standstill(Exception):
    """Neither worker of a hand-off can go on: each waits for blocks that others of their hand-offs hold."""


class Attempt:
    """A context manager around `tokens`. Its exit gives the load back and aborts what still runs on the workers.

    ``failed`` are the workers that a retry should avoid. With ``hold_first_token``, `tokens` yields token 1 when decode
    has all KV, not when prefill has sampled it.
    """

    def __init__(
        self,
        session: Session,
        assignment: Assignment,
        registry: WorkerRegistry,
        config: RouterConfig,
        clock: Clock,
        arrivals: Arrivals,
        chance: random.Random,
    ) -> None:
        self.failed: set[str] = set()
        self._session, self._deadline = session, session.deadline
        self._request = session.next_attempt(chance)
        self._assignment = assignment
        self._registry = registry
        self._config = config
        self._clock = clock
        self._arrivals = arrivals
        self._hold_first_token = config.first_token == "decode"
        self._delivered_before = len(session.output_token_ids)
        self._streams: list[WorkerStream] = []
        self._contacted: list[RegisteredWorker] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._left = False
        self._placed_s = clock.now()
        self._complete = False
        self._dispatched = self._decoded = False
        self._prefix: PrefixSending | None = None
        self._handing_off: RegisteredWorker | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._chance = chance
        self._measure = Measure(assignment)

    async def __aenter__(self) -> Attempt:
        prefill, is_pair = self._assignment.prefill.worker, self._assignment.decode is not None
        self._session.result = RoutingResult(
            Mode.PD if is_pair else Mode.COLOCATED,
            prefill.worker_id,
            "" if is_pair else prefill.worker_id,
            prefill.info.layout.block_size,
        )
        self._note(EventKind.PAIR_CHOSEN)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TransferError):
            self.failed |= {worker.worker_id for worker in self._contacted}
        self._judge(error)
        self._leave()
        for stream in self._streams:
            stream.close()
        self._streams.clear()  # they refer to this attempt, and only garbage collection would free both
        # A retry may need their blocks. They go on by themselves if this is cancelled.
        if self._aborts and not isinstance(error, DeadlineExceeded):
            await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)

    def _judge(self, error: BaseException | None) -> None:
        """Report to the registry which workers served the request, and which failed it."""
        for share in (self._assignment.prefill, self._assignment.decode):
            if share is None:
                continue
            if share.worker.worker_id in self.failed:
                if isinstance(error, WorkerLost | TransferError):
                    self._registry.failed(share, error)
            elif self._decoded if share is self._assignment.decode else self.gave_tokens:
                self._registry.succeeded(share)

    def _leave(self) -> None:
        """Give the load back, and abort the request on the workers unless it is complete. May be called twice."""
        if self._left:
            return
        self._left = True
        if self._watch is not None:
            self._watch.cancel()
        if not self._complete:
            self._aborts = {
                self._registry.spawn(_abort(worker.handle, self._request.attempt_id)) for worker in self._contacted
            }
        self._end_prefix()
        self._end_hand_off()
        self._assignment.end()

    @property
    def attempt_id(self) -> str:
        """Its id on the workers."""
        return self._request.attempt_id

    @property
    def age_s(self) -> float:
        """Seconds since its workers were chosen."""
        return self._clock.now() - self._placed_s

    @property
    def gave_tokens(self) -> bool:
        """Whether the request has tokens from this attempt."""
        return len(self._session.output_token_ids) > self._delivered_before

    def call_off(self) -> None:
        """Note that nothing more is wanted. If decode has given no token, its hand-off is cancelled, so that no KV
        bytes are expected."""
        if not self._decoded:
            self._session.result.kv_bytes_expected = 0

    @property
    def hands_off(self) -> bool:
        """Whether both workers have the request and decode has given nothing yet."""
        return self._dispatched and not self._decoded

    def served(self) -> Served | None:
        """What the attempt has measured, for the cost model; None if it is a retry, gave no token, or also computed
        log-probabilities of its prompt. Call it after the last token."""
        if self._delivered_before or self._request.sampling.prompt_logprobs is not None:
            return None
        return self._measure.served(self._session, self._request.num_tokens, self._registry)

    def tokens(self) -> AsyncGenerator[RoutedToken, None]:
        """The tokens of this attempt. Raises the error that ends it, after adding workers to `failed`."""
        decode = self._assignment.decode
        if decode is None or (self._request.max_tokens == 1 and self._assignment.prefill.worker.info.serves_alone):
            return self._on_one_worker()
        return self._on_pair(decode)

    async def _on_one_worker(self) -> AsyncGenerator[RoutedToken, None]:
        share = self._assignment.prefill
        self._send(share.worker)
        stream = self._open(share)
        stream.limit_unread(self._config.max_unread_tokens)
        share.worker.handle.run(self._request, stream, self._fetch_prefix(share.worker))
        while not self._complete:
            token = await self._token(stream)
            if token.finish_reason is not None:
                self._assignment.end()
            yield token

    async def _on_pair(self, decode_share: Share) -> AsyncGenerator[RoutedToken, None]:
        share, decode, request = self._assignment.prefill, decode_share.worker, self._request
        self._session.result.decode_worker = decode.worker_id
        if decode.info.proves_transfers:
            self._session.result.kv_bytes_expected = decode.info.layout.expected_bytes(request.num_tokens)
        self._send(share.worker, decode)
        self._dispatched = True
        # Both workers at once. Prefill comes first, because token 1 waits for it; decode has its whole prefill to
        # allocate blocks and to announce them.
        decoding, prefilling = self._open(decode_share), self._open(share)
        share.worker.handle.push(request, decode.info.peer, prefilling, self._fetch_prefix(share.worker))
        decode.handle.receive(request, share.worker.info.peer, decoding, self._hold_first_token)
        self._watch_for_standstill(share.worker, decoding)
        arrival = await self._first_of(prefilling, decoding)
        if arrival.output.hand_off:
            decode.handle.hand_over(request.attempt_id, arrival.output.hand_off)
        if not self._left:
            self._handing_off = share.worker
            share.worker.hand_offs += 1
        share.end()
        if self._hold_first_token and arrival.output.finish_reason is None:
            arrival = arrival._replace(time_s=await self._until_ready(prefilling, decoding))
        token = self._token_of(arrival, share.worker)
        yield token
        if token.finish_reason is not None:
            await self._proof_alone(prefilling, decoding)
            return
        if not self._hold_first_token:
            await self._handed_off(prefilling, decoding)
        while not self._complete:
            yield await self._token(decoding)

    async def _first_of(self, prefilling: WorkerStream, decoding: WorkerStream) -> Arrival:
        """Wait for token 1 of prefill. Raises decode's error if decode fails before. Raises `WorkerLost` if decode
        gives tokens and prefill's does not follow within the heartbeats' timeout: prefill cannot reach this gateway."""
        doing = f"prefilling on {prefilling.worker.worker_id}"
        while not (prefilling.has_changed or decoding.has_changed):
            await self._deadline.bound(self._change(), doing)
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                while not (prefilling.has_changed or decoding.has_failed):
                    await self._deadline.bound(self._change(), doing)
        except TimeoutError:
            self.failed.add(prefilling.worker.worker_id)
            lost = f"worker {prefilling.worker.worker_id} gave no token, and decode goes on without it"
            raise WorkerLost(lost) from None
        if not prefilling.has_output and decoding.has_failed:
            await self._next(decoding)
        arrival = await self._next(prefilling)
        # Not before: the client can read none of decode's tokens without token 1.
        decoding.limit_unread(self._config.max_unread_tokens)
        return arrival

    async def _handed_off(self, prefilling: WorkerStream, decoding: WorkerStream) -> None:
        """Wait until decode has sent something, for which it needs all KV. Raises prefill's error if prefill is lost
        before: decode alone would notice a prefill worker that hangs when the lease of its blocks ends."""
        doing = f"waiting for worker {decoding.worker.worker_id}"
        while not (decoding.has_changed or prefilling.has_failed):
            await self._deadline.bound(self._change(), doing)
        if not decoding.has_changed:
            await self._next(prefilling)
        self._end_hand_off()
        prefilling.worker.handle.forget(self._request.attempt_id)

    def _end_hand_off(self) -> None:
        """Note that prefill is not needed any more. May be called again."""
        if self._handing_off is not None:
            self._handing_off.hand_offs -= 1
            self._handing_off = None

    async def _until_ready(self, prefilling: WorkerStream, decoding: WorkerStream) -> float:
        """Wait until decode has all KV. Returns when its message arrived, in seconds of the gateway's clock."""
        await self._handed_off(prefilling, decoding)
        ready = await self._next(decoding)
        if ready.output.finish_reason is not None:
            raise WorkerLost(f"worker {decoding.worker.worker_id} aborted the request ({ready.output.finish_reason})")
        if self._delivered_before == 0:
            self._merge(ready.output.events, decoding.worker)
        return ready.time_s

    async def _token(self, stream: WorkerStream) -> RoutedToken:
        """The next token of the stream that gives the last token."""
        arrival = await self._next(stream)
        token = self._token_of(arrival, stream.worker)
        self._complete = token.finish_reason is not None
        return token

    def _token_of(self, arrival: Arrival, worker: RegisteredWorker) -> RoutedToken:
        if (token := self._deliver(arrival, worker)) is None:
            reason = arrival.output.finish_reason or "no finish reason"
            raise WorkerLost(f"worker {worker.worker_id} sent an output without a token ({reason})")
        return token

    async def _proof_alone(self, prefilling: WorkerStream, decoding: WorkerStream) -> None:
        """Wait for the proof after the last token. If the hand-off fails now, the result has no proof."""
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._handed_off(prefilling, decoding)
                arrival = await self._next(decoding)
        except Standstill:
            self.call_off()
            return
        except (PdserveError, TimeoutError) as error:
            log.warning("request %s: no proof of its hand-off: %s", self._request.request_id, error)
            return
        self._complete = True
        self._deliver(arrival, decoding.worker)

    # --- internals -------------------------------------------------------------------------------------------------

    def _fetch_prefix(self, worker: RegisteredWorker) -> PrefixSource | None:
        """Have another worker send ``worker`` the KV of the prompt's beginning, if that is planned."""
        if (fetch := self._assignment.fetch) is None:
            return None
        source = self._registry.get(fetch.source)
        if source is None or source.lost:
            return None
        request = self._request.prefix(fetch.num_tokens, prefix_transfer_id(self._request.attempt_id), SOURCE_TIMEOUT_S)
        self._prefix = PrefixSending(source, request.attempt_id)
        source.handle.send_prefix(request, worker.info.peer, self._prefix)
        return PrefixSource(source.info.peer, fetch.num_tokens, fetch.timeout_s)

    def _end_prefix(self) -> None:
        """Release the blocks of the prompt's beginning at its source, unless that has been done."""
        prefix, self._prefix = self._prefix, None
        if prefix is not None and not prefix.ended:
            self._registry.spawn(_abort(prefix.source.handle, prefix.attempt_id))

    def _note_fetch(self, fetch: PrefixFetch, worker: RegisteredWorker) -> None:
        self._session.result.prefix_fetch = fetch
        self._session.result.prefix_bytes_expected = worker.info.layout.expected_bytes(fetch.tokens)
        if fetch.failure:
            log.warning("request %s: a prefix is computed: %s", self._request.request_id, fetch.failure)
            self._registry.fetch_failed(worker, fetch.source)

    def _watch_for_standstill(self, prefill: RegisteredWorker, decoding: WorkerStream) -> None:
        """Fail ``decoding`` with `Standstill` when both workers have stood still for `STANDSTILL_S` and it has given
        nothing."""
        decode, now_s = decoding.worker, self._clock.now()
        if self._decoded or decoding.has_changed:
            return
        if now_s - max(prefill.stalled_s, decode.stalled_s) > STANDSTILL_S * (2 if self.gave_tokens else 1):
            # Their next heartbeats tell whether this was enough: the others of them go on waiting.
            prefill.stalled_s = decode.stalled_s = math.inf
            ids = f"{prefill.worker_id} and {decode.worker_id}"
            decoding.failed(Standstill(f"{ids} waited for blocks that each other's hand-offs hold"))
            return
        pause_s = STANDSTILL_S * self._chance.uniform(0.25, 0.5)
        self._watch = asyncio.get_running_loop().call_later(pause_s, self._watch_for_standstill, prefill, decoding)

    def _send(self, *workers: RegisteredWorker) -> None:
        self._note(EventKind.PREFILL_SENT)
        self._measure.sent()
        self._contacted += workers

    def _open(self, share: Share) -> WorkerStream:
        def arrived(output: TokenOutput) -> None:
            if output.token_id is not None:
                self._registry.answered(share)
                share.prefilled()
                share.token_made()
            if output.finish_reason is not None:
                share.end()

        stream = WorkerStream(
            share.worker,
            self._clock,
            self._arrivals,
            on_arrival=arrived,
            on_change=self._changed,
            on_stall=self._leave,
        )
        self._streams.append(stream)
        return stream

    async def _next(self, stream: WorkerStream) -> Arrival:
        try:
            while (arrival := stream.next()) is None:
                await self._deadline.bound(self._change(), f"waiting for worker {stream.worker.worker_id}")
        except (WorkerLost, NotReady):
            self.failed.add(stream.worker.worker_id)
            self._registry.suspect(stream.worker)
            raise
        except CapacityExceeded:
            self.failed.add(stream.worker.worker_id)
            raise
        return arrival

    def _change(self) -> asyncio.Future[None]:
        """Done when a stream has changed."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _changed(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note(self, kind: EventKind) -> None:
        if self._delivered_before == 0:
            self._session.timeline.record(kind, GATEWAY, self._clock.now())

    def _deliver(self, arrival: Arrival, worker: RegisteredWorker) -> RoutedToken | None:
        """Merge an output into the session. Returns its token, if it has one."""
        output, session, result = arrival.output, self._session, self._session.result
        if (proof := output.proof) is not None:
            layout = worker.info.layout
            result.proof = proof
            result.kv_bytes_expected = layout.expected_bytes(self._request.num_tokens, proof.blocks_skipped)
        if output.prompt_logprobs:
            session.prompt_logprobs = output.prompt_logprobs
        if output.prefix_fetch is not None:
            self._note_fetch(output.prefix_fetch, worker)
        if output.cached_tokens:  # the prompt of a retry includes the outputs so far
            result.prefill_cached_tokens = min(output.cached_tokens, len(session.request.prompt_token_ids))
        result.draft_tokens += output.draft_tokens
        result.accepted_draft_tokens += output.accepted_draft_tokens
        if worker.worker_id == result.decode_worker:
            self._decoded = True
        index = len(session.output_token_ids)
        if self._delivered_before == 0 and index <= 1:
            self._merge(output.events, worker)
        elif self._delivered_before == index == 1:
            renamed = (Event(_AS_TOKEN_2[e.kind], e.worker, e.time_s) for e in output.events if e.kind in _AS_TOKEN_2)
            self._merge(tuple(renamed), worker)
        if output.token_id is None:
            return None
        self._end_prefix()
        if index <= 1:
            kind = EventKind.TOKEN_1_ARRIVED if index == 0 else EventKind.TOKEN_2_ARRIVED
            session.timeline.record(kind, GATEWAY, arrival.time_s)
        self._measure.token(index, worker, arrival.time_s)
        session.output_token_ids.append(output.token_id)
        return RoutedToken(output.token_id, output.finish_reason, output.logprobs, arrival.time_s)

    def _merge(self, events: tuple[Event, ...], worker: RegisteredWorker) -> None:
        self._session.timeline.extend(events)
        self._session.timeline.clocks[worker.worker_id] = worker.handle.clock


class PrefixSending:
    """The sending of a prefix by ``source``, under ``attempt_id``. A failure concerns the source alone: the worker that
    waits for the prefix notices it, and computes the prompt."""

    def __init__(self, source: RegisteredWorker, attempt_id: str) -> None:
        self.source, self.attempt_id = source, attempt_id
        self.ended = False

    def output(self, output: TokenOutput) -> None:
        """Note that it has ended."""
        self.ended = output.finish_reason is not None

    def failed(self, error: PdserveError) -> None:
        """Note that it has ended."""
        self.ended = True
        log.info("%s sends no prefix for %s: %s", self.source.worker_id, self.attempt_id, error)


async def _abort(handle: WorkerHandle, attempt_id: str) -> None:
    try:
        await handle.abort(attempt_id)
    except PdserveError as error:
        log.warning("abort of %s on worker %s: %s", attempt_id, handle.info.worker_id, error)
