"""The router: assigns requests to workers, retries failed attempts, and returns tokens. It reaches workers through
handles only."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import KVFailurePolicy, RouterConfig
from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, NotReady, PdserveError, TransferError, to_wire
from pdserve.core.request import REQUEST_TRANSITIONS, FailedAttempt, Mode, RequestStatus
from pdserve.core.timeline import EventKind
from pdserve.core.worker import Role
from router.arrivals import Arrivals
from router.attempt import Attempt
from router.fair_queue import Waiting, is_below_share
from router.registry import Assignment, WorkerRegistry
from router.request_record import RequestRecord, RoutedToken, RoutingResult
from router.retries import Failures, RetryBudget
from router.view import Needs, WaitMode
from router.waiting_line import WaitingLine
from router.worker_stream import ReaderStalled
from runtime.logs import bind_request

log = logging.getLogger(__name__)

REFIT_S = 1.0
"""The cost model's lines are fitted again so often, at most."""

MAX_PLACEMENTS = 16
"""Placements that a request keeps, and failures: those of its last attempts."""

MAX_BURST_QUEUE = 1024
"""Bursts are no longer taken in first when so many requests wait and the queue is not full: a request needs less memory
inside gRPC."""

_BEFORE_ROUTER = frozenset({EventKind.RECEIVED, EventKind.TOKENIZED})
_ALL_ATTEMPT = frozenset(EventKind) - _BEFORE_ROUTER
_TOKEN_2 = frozenset(
    {
        EventKind.ROOM_MADE,
        EventKind.KV_VERIFIED,
        EventKind.DECODE_SCHEDULED,
        EventKind.TOKEN_2_SAMPLED,
        EventKind.TOKEN_2_ARRIVED,
    }
)


class Router:
    """Routes requests to the workers of ``registry``.

    ``auto_mode`` replaces mode ``auto``: it is ``auto`` itself, or ``colocated`` in a service with one role.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        config: RouterConfig,
        clock: Clock,
        auto_mode: WaitMode = Mode.AUTO,
        on_kv_failure: KVFailurePolicy = "retry",
        chance: random.Random = SYSTEM,
    ) -> None:
        self.registry = registry
        self.chance = chance
        self.auto_mode = auto_mode
        self._config = config
        self._clock = clock
        self._on_kv_failure = on_kv_failure
        self._line = WaitingLine(registry, config, clock)
        self._budget = RetryBudget(clock, lambda: self._active.total())
        self._orders = itertools.count()
        self._tickets = itertools.count()
        self._arrivals = Arrivals()
        self._active = Counter[str]()  # requests that have not ended, by holder
        self._refit_s = float("-inf")

    @property
    def queued(self) -> int:
        """Number of requests that wait for a worker."""
        return self._line.length

    @property
    def short_of(self) -> Role | None:
        """The role whose workers the next requests wait for. None if nothing waits, or for something else."""
        return self._line.short_of

    @property
    def running(self) -> int:
        """Number of requests that are on workers."""
        return max(0, self._active.total() - self._line.length)

    def arrived(self, client: str, being_read: Counter[str]) -> None:
        """Check a new request of ``client`` before it is read. ``being_read`` counts the requests that wait to be
        tokenized, by client. `CapacityExceeded` if these, or the queue, have reached ``router.max_queue``, or the queue
        has reached ``router.max_queue_tokens``, and no other client has more of them."""
        refusal = self._line.refusal(client)
        if refusal is None and being_read.total() >= self._config.max_queue and not is_below_share(being_read, client):
            refusal = self._line.too_many()
        if refusal is not None:
            # A client that is refused must not pause others. Alone, it gets its refusals sooner.
            if self._active.keys() <= {client}:
                self._arrivals.note()
            raise refusal

    def was_read(self) -> None:
        """Note a new request, which pauses others in a burst. A call that is cancelled before it is read does not."""
        if self._line.length < MAX_BURST_QUEUE:
            self._arrivals.note()

    def _learn(self, attempt: Attempt) -> None:
        """Give the cost model the measurements of a completed request, and refresh what it predicts."""
        now_s, model = self._clock.now(), self.registry.cost_model
        if (served := attempt.served()) is not None:
            model.note(served)
        if now_s - self._refit_s >= REFIT_S:
            self._refit_s = now_s
            model.refit()

    def generate(self, record: RequestRecord) -> Generation:
        """Return the tokens of a request as an async iterator, which starts the request when the first is read.

        Iterating raises `NotReady` or `LayoutMismatch` (no worker can take it), `CapacityExceeded` (the queue is full,
        or the request does not fit), `DeadlineExceeded`, and `WorkerLost` or `TransferError` after the last attempt.
        """
        return Generation(record, self)


class Generation:
    """The tokens of a request as an async iterator (use ``contextlib.aclosing``), and its `result`.

    Closing the iterator, or cancelling its reader, aborts the request on its workers.
    """

    def __init__(self, record: RequestRecord, router: Router) -> None:
        self.record = record
        self.result = RoutingResult()
        self._router = router
        self._order = next(router._orders)
        self._mode: WaitMode = router.auto_mode if record.request.mode is Mode.AUTO else record.request.mode
        self._stopped = False
        self._attempt: Attempt | None = None
        self._tokens = self._generate()

    def __aiter__(self) -> AsyncGenerator[RoutedToken, None]:
        return self._tokens

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        await self._tokens.aclose()

    async def stop(self) -> None:
        """End the request as finished, because the client needs no more tokens."""
        self._stopped = True
        if self._attempt is not None:
            self._attempt.call_off()
            self._router._learn(self._attempt)
        await self.aclose()

    async def _generate(self) -> AsyncGenerator[RoutedToken, None]:
        record, router = self.record, self._router
        request_id = record.request.request_id
        router._active[record.holder] += 1
        router._budget.note_request()
        try:
            failures = Failures(router._config.max_attempts)
            while True:
                assignment = await self._place(failures)
                record.transition(RequestStatus.RUNNING)
                record.attempts += 1
                attempt = self._attempt = Attempt(
                    record,
                    assignment,
                    self.result,
                    router.registry,
                    router._clock,
                    router._config.max_unread_tokens,
                    router._arrivals,
                    router._config.first_token == "decode",
                    chance=router.chance,
                )
                bind_request(request_id, attempt.attempt_id)
                try:
                    async with attempt, aclosing(attempt.tokens()) as tokens:
                        async for token in tokens:
                            if token.finish_reason is not None:
                                record.transition(RequestStatus.FINISHED)
                            yield token
                    router._learn(attempt)
                    return
                except ReaderStalled as stalled:
                    log.info("request %s: paused until its client reads: %s", request_id, stalled)
                    failures.reset()
                    record.recomputed_tokens += record.num_tokens
                except PdserveError as error:
                    # A worker that refuses the request has not failed its hand-off.
                    handoff_failed = attempt.hands_off and not isinstance(error, CapacityExceeded | NotReady)
                    if handoff_failed and router._on_kv_failure == "fail":
                        raise
                    if (final := failures.add(error, attempt, assignment)) is not None:
                        raise final from error
                    log.warning("request %s: attempt %d failed: %s", request_id, record.attempts, error)
                    record.failures.append(FailedAttempt(", ".join(sorted(attempt.failed)), *to_wire(error)))
                    del record.failures[:-MAX_PLACEMENTS]
                    if handoff_failed and router._on_kv_failure == "recompute":
                        self._mode = Mode.COLOCATED
                    elif isinstance(error, TransferError) and failures.is_last:
                        self._mode = Mode.COLOCATED  # needs no KV transfer
                record.transition(RequestStatus.QUEUED)
                self._forget_attempt()
                if failures.in_a_row:
                    await self._pause(failures)
        except (asyncio.CancelledError, GeneratorExit):
            self._end(RequestStatus.FINISHED if self._stopped else RequestStatus.ABORTED)
            raise
        except BaseException:
            self._end(RequestStatus.FAILED)
            raise
        finally:
            router._active[record.holder] -= 1
            if not router._active[record.holder]:
                del router._active[record.holder]

    async def _pause(self, failures: Failures) -> None:
        """Wait before a retry, then until the retry budget allows one."""
        router, deadline = self._router, self.record.deadline
        doing = "waiting for a retry"
        await deadline.sleep(failures.pause_s * router.chance.uniform(0.5, 1.5), doing)
        while not router._budget.take():
            await deadline.sleep(
                router._budget.wait_s() + router.chance.uniform(0.01, 0.1), f"{doing}: too many others are retried"
            )

    async def _place(self, failures: Failures) -> Assignment:
        record, deadline = self.record, self.record.deadline
        needs = Needs(
            self._mode,
            record.num_tokens,
            record.tokens_left,
            failures.avoid,
            failures.prefer,
            ticket=next(self._router._tickets),
            session=record.request.session_id,
            min_output_tokens=_min_output_tokens(record),
            ahead=is_below_share(self._router._active, record.holder),
        )
        waiting = Waiting(
            self._order,
            needs,
            record.client,
            record.holder,
            record.request.priority,
            patient=record.attempts > 0,
            retry=failures.in_a_row > 0,
            prompt=self._router.registry.prompt(record.request, record.token_ids),
        )
        if not record.attempts:
            self._router._line.check_deadline(waiting, deadline.left_s)
        try:
            assignment = await deadline.bound(self._router._line.wait(waiting), "waiting for a free worker")
        except DeadlineExceeded as error:
            missing = self._router.registry.unavailable(self._mode)
            raise error if missing is None else DeadlineExceeded(f"{error}; {missing}") from None
        if self._router._arrivals.is_burst:
            try:
                await deadline.bound(self._router._arrivals.settled(), "waiting while other requests were accepted")
            except BaseException:
                assignment.end()
                raise
        # Its workers, too, let it come before others if it has aged, or its client has few.
        if (waiting.priority, needs.ahead) != (record.request.priority, record.request.ahead):
            priority = min(waiting.priority, record.request.priority)
            record.request = msgspec.structs.replace(record.request, priority=priority, ahead=needs.ahead)
        record.placements.append(assignment.reason)
        del record.placements[:-MAX_PLACEMENTS]
        log.debug("request %s: attempt %d: %s", record.request.request_id, record.attempts + 1, assignment.reason)
        return assignment

    def _forget_attempt(self) -> None:
        """Remove the events of tokens that were not delivered."""
        delivered = len(self.record.output_token_ids)
        if delivered <= 1:
            self.record.timeline.forget(_TOKEN_2 if delivered else _ALL_ATTEMPT)

    def _end(self, status: RequestStatus) -> None:
        if status in REQUEST_TRANSITIONS[self.record.status]:
            self.record.transition(status)


def _min_output_tokens(record: RequestRecord) -> int:
    """The fewest tokens that a request still generates."""
    sampling = record.request.sampling
    ends_early = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids
    return 1 if ends_early else record.tokens_left
