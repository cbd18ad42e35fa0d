"""One attempt to serve a request on its workers: calls, merging of their streams, and clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from types import TracebackType

from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, NotReady, PdserveError, TransferError, WorkerLost
from pdserve.core.request import Mode
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import GATEWAY, Event, EventKind
from pdserve.core.worker import TokenOutput
from router.arrivals import Arrivals
from router.handles import WorkerHandle
from router.registered_worker import RegisteredWorker, Share
from router.registry import Assignment, WorkerRegistry
from router.request_record import RequestRecord, RoutedToken, RoutingResult
from router.worker_stream import Arrival, WorkerStream

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0  # after this, the blocks of a worker that does not answer are freed by their leases
PROOF_TIMEOUT_S = 10.0  # how long to wait for the proof after the last token

# A retry after token 1 gets token 2 from a prefill, whose events replace those of decode.
_AS_TOKEN_2 = {
    EventKind.PREFILL_SCHEDULED: EventKind.DECODE_SCHEDULED,
    EventKind.TOKEN_1_SAMPLED: EventKind.TOKEN_2_SAMPLED,
}


class Attempt:
    """A context manager around `tokens`. Its exit gives the load back and aborts what still runs on the workers.

    ``failed`` are the workers that a retry should avoid. With ``hold_first_token``, `tokens` yields token 1 when decode
    has all KV, not when prefill has sampled it.
    """

    def __init__(
        self,
        record: RequestRecord,
        assignment: Assignment,
        result: RoutingResult,
        registry: WorkerRegistry,
        clock: Clock,
        max_unread: int,
        arrivals: Arrivals,
        hold_first_token: bool = False,
    ) -> None:
        self.failed: set[str] = set()
        self._record = record
        self._request = record.next_attempt()
        self._assignment = assignment
        self._result = result
        self._registry = registry
        self._clock = clock
        self._deadline = record.deadline
        self._max_unread = max_unread
        self._arrivals = arrivals
        self._hold_first_token = hold_first_token
        self._delivered_before = len(record.output_token_ids)
        self._streams: list[WorkerStream] = []
        self._contacted: list[RegisteredWorker] = []
        self._aborts: set[asyncio.Task[None]] = set()
        self._left = False
        self._placed_s = clock.now()
        self._complete = False
        self._dispatched = self._decoded = False

    async def __aenter__(self) -> Attempt:
        prefill = self._assignment.prefill.worker
        result = self._result
        colocated = self._assignment.decode is None
        result.mode = Mode.COLOCATED if colocated else Mode.PD
        result.prefill_worker, result.decode_worker = prefill.worker_id, prefill.worker_id if colocated else ""
        result.proof, result.kv_bytes_expected, result.prefill_cached_tokens = None, 0, 0
        result.block_size, result.attempts = prefill.info.layout.block_size, self._record.attempts
        self._note(EventKind.PAIR_CHOSEN)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TransferError):
            self.failed |= {worker.worker_id for worker in self._contacted}
        self._leave()
        for stream in self._streams:
            stream.cancel()
        # A second cancellation must not leave streams open: a deadline and the client's often come together.
        closing = asyncio.create_task(self._close())
        _keep(closing)
        await asyncio.shield(closing)

    def _leave(self) -> None:
        """Give the load back, and abort the request on the workers unless it is complete. May be called twice."""
        if self._left:
            return
        self._left = True
        if not self._complete:
            self._aborts = {
                asyncio.create_task(_abort(worker.handle, self._request.attempt_id)) for worker in self._contacted
            }
            for task in self._aborts:
                _keep(task)
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
        return len(self._record.output_token_ids) > self._delivered_before

    def call_off(self) -> None:
        """Note that no more tokens are wanted. If decode has given no token, its hand-off is cancelled, so that no KV
        bytes are expected."""
        if not self._decoded:
            self._result.kv_bytes_expected = 0

    @property
    def hands_off(self) -> bool:
        """Whether both workers have the request and decode has given nothing yet."""
        return self._dispatched and not self._decoded

    def tokens(self) -> AsyncGenerator[RoutedToken, None]:
        """The tokens of this attempt. Raises the error that ends it, after adding workers to `failed`."""
        return self._colocated() if self._assignment.decode is None else self._pd(self._assignment.decode)

    async def _colocated(self) -> AsyncGenerator[RoutedToken, None]:
        share = self._assignment.prefill
        self._send(share.worker)
        stream = self._open(share, share.worker.handle.run(self._request))
        while not self._complete:
            yield await self._token(stream)

    async def _pd(self, decode_share: Share) -> AsyncGenerator[RoutedToken, None]:
        share, decode, request = self._assignment.prefill, decode_share.worker, self._request
        if request.max_tokens == 1:
            self._send(share.worker)
            token = await self._token(self._open(share, share.worker.handle.run(request)))
            self._complete = True
            self._assignment.end()
            yield token
            return
        self._result.decode_worker = decode.worker_id
        self._result.kv_bytes_expected = decode.info.layout.expected_bytes(request.num_tokens)
        self._send(share.worker, decode)
        self._dispatched = True
        # Both at once: prefill computes while decode allocates blocks and announces them.
        decoding = self._open(
            decode_share, decode.handle.receive(request, share.worker.info.peer, self._hold_first_token)
        )
        prefilling = self._open(share, share.worker.handle.push(request, decode.info.peer))
        arrival = await self._first_of(prefilling, decoding)
        share.end()
        if self._hold_first_token and arrival.output.finish_reason is None:
            arrival = arrival._replace(time_s=await self._until_ready(decoding))
        token = self._token_of(arrival, share.worker)
        yield token
        if token.finish_reason is not None:
            await self._proof_alone(decoding)
            return
        while not self._complete:
            yield await self._token(decoding)

    async def _first_of(self, prefilling: WorkerStream, decoding: WorkerStream) -> Arrival:
        """Wait for token 1 of prefill. Raises decode's error if decode fails before."""
        tasks = {asyncio.create_task(prefilling.wait_changed()), asyncio.create_task(decoding.wait_changed())}
        try:
            await self._deadline.bound(
                asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED), f"prefilling on {prefilling.worker.worker_id}"
            )
        finally:
            for task in tasks:
                task.cancel()
        if not prefilling.has_output and decoding.has_failed:
            await self._next(decoding)
        return await self._next(prefilling)

    async def _until_ready(self, decoding: WorkerStream) -> float:
        """Wait until decode has all KV. Returns when its message arrived, in seconds of the gateway's clock."""
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
        reason = arrival.output.finish_reason
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise WorkerLost(f"worker {worker.worker_id} aborted the request ({reason})")
        token = self._deliver(arrival, worker)
        if token is None:
            raise WorkerLost(
                f"worker {worker.worker_id} sent an output without a token ({reason or 'no finish reason'})"
            )
        return token

    async def _proof_alone(self, decoding: WorkerStream) -> None:
        """Wait for the proof after the last token. If the hand-off fails now, the result has no proof."""
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                arrival = await self._next(decoding)
        except (PdserveError, TimeoutError) as error:
            log.warning("request %s: no proof of its hand-off: %s", self._request.request_id, error)
            return
        self._complete = True
        self._deliver(arrival, decoding.worker)

    async def _close(self) -> None:
        for outcome in await asyncio.gather(*(stream.close() for stream in self._streams), return_exceptions=True):
            if outcome is not None:
                log.warning("request %s: cannot close the stream of a worker: %r", self._request.request_id, outcome)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)

    # --- internals -------------------------------------------------------------------------------------------------

    def _send(self, *workers: RegisteredWorker) -> None:
        self._note(EventKind.PREFILL_SENT)
        self._contacted += workers

    def _open(self, share: Share, outputs: AsyncIterator[TokenOutput]) -> WorkerStream:
        def arrived(output: TokenOutput) -> None:
            if output.token_id is not None:
                share.prefilled()
                share.token_made()
            if output.finish_reason is not None:
                share.end()

        stream = WorkerStream(
            outputs,
            share.worker,
            self._clock,
            self._deadline,
            self._arrivals,
            max_unread=self._max_unread,
            on_arrival=arrived,
            on_stall=self._leave,
        )
        self._streams.append(stream)
        return stream

    async def _next(self, stream: WorkerStream) -> Arrival:
        with self._blaming(stream.worker):
            return await stream.next()

    @contextlib.contextmanager
    def _blaming(self, worker: RegisteredWorker) -> Iterator[None]:
        try:
            yield
        except (WorkerLost, NotReady):
            self.failed.add(worker.worker_id)
            self._registry.suspect(worker)
            raise
        except CapacityExceeded:
            self.failed.add(worker.worker_id)
            raise

    def _note(self, kind: EventKind) -> None:
        if self._delivered_before == 0:
            self._record.timeline.record(kind, GATEWAY, self._clock.now())

    def _deliver(self, arrival: Arrival, worker: RegisteredWorker) -> RoutedToken | None:
        """Merge an output into record and result. Returns its token, if it has one."""
        output, record = arrival.output, self._record
        if (proof := output.proof) is not None:
            layout = worker.info.layout
            self._result.proof = proof
            self._result.kv_bytes_expected = layout.expected_bytes(self._request.num_tokens, proof.blocks_skipped)
        if output.cached_tokens:  # the prompt of a retry includes the outputs so far
            self._result.prefill_cached_tokens = min(output.cached_tokens, len(record.request.prompt_token_ids))
        if worker.worker_id == self._result.decode_worker:
            self._decoded = True
        index = len(record.output_token_ids)
        if self._delivered_before == 0 and index <= 1:
            self._merge(output.events, worker)
        elif self._delivered_before == index == 1:
            renamed = (Event(_AS_TOKEN_2[e.kind], e.worker, e.time_s) for e in output.events if e.kind in _AS_TOKEN_2)
            self._merge(tuple(renamed), worker)
        if output.token_id is None:
            return None
        if index <= 1:
            kind = EventKind.TOKEN_1_ARRIVED if index == 0 else EventKind.TOKEN_2_ARRIVED
            record.timeline.record(kind, GATEWAY, arrival.time_s)
        record.output_token_ids.append(output.token_id)
        return RoutedToken(output.token_id, output.finish_reason, output.logprobs)

    def _merge(self, events: tuple[Event, ...], worker: RegisteredWorker) -> None:
        if events:
            self._record.timeline.extend(events)
            self._record.timeline.clocks[worker.worker_id] = worker.handle.clock


_BACKGROUND: set[asyncio.Task[None]] = set()  # the event loop holds only weak references to tasks


def _keep(task: asyncio.Task[None]) -> None:
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)


async def _abort(handle: WorkerHandle, attempt_id: str) -> None:
    try:
        await handle.abort(attempt_id)
    except PdserveError as error:
        log.warning("abort of %s on worker %s: %s", attempt_id, handle.info.worker_id, error)
