"""The router: assigns requests to workers, retries failed attempts, and returns tokens. It reaches workers through
handles only."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import msgspec

from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.config import KVFailurePolicy, RouterConfig
from pdserve.core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    NotReady,
    PdserveError,
    TransferError,
    TransferTimeout,
    to_wire,
)
from pdserve.core.request import FailedAttempt, Mode, RequestStatus
from pdserve.core.timeline import EventKind
from pdserve.core.worker import Role
from router.arrivals import Arrivals
from router.attempt import Attempt, Standstill
from router.deadline import Deadline
from router.fair_queue import Waiting, is_below_share
from router.registry import Assignment, WorkerRegistry
from router.retries import Failures, RetryBudget
from router.session import RoutedToken, Session
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
        EventKind.DECODE_SENT,
        EventKind.DECODE_ANSWERED,
        EventKind.ROOM_MADE,
        EventKind.KV_VERIFIED,
        EventKind.DECODE_SCHEDULED,
        EventKind.DRAFTED,
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

    async def generate(self, session: Session) -> AsyncGenerator[RoutedToken, None]:
        """The tokens of a request. Closing the generator (use ``contextlib.aclosing``) or cancelling its reader aborts
        the request on its workers.

        Raises `NotReady` or `LayoutMismatch` (no worker can take it), `CapacityExceeded` (the queue is full, or the
        request does not fit), `DeadlineExceeded`, and `WorkerLost` or `TransferError` after the last attempt.
        """
        request_id, order = session.request.request_id, next(self._orders)
        mode: WaitMode = self.auto_mode if session.request.mode is Mode.AUTO else session.request.mode
        self._active[session.holder] += 1
        self._budget.note_request()
        try:
            failures = Failures(self._config.max_attempts)
            while True:
                assignment = await self._place(session, mode, order, failures)
                session.transition(RequestStatus.RUNNING)
                session.attempts += 1
                attempt = Attempt(
                    session, assignment, self.registry, self._config, self._clock, self._arrivals, self.chance
                )
                bind_request(request_id, attempt.attempt_id)
                try:
                    async with attempt, aclosing(attempt.tokens()) as tokens:
                        async for token in tokens:
                            if token.finish_reason is not None:
                                session.transition(RequestStatus.FINISHED)
                            try:
                                yield token
                            except GeneratorExit:
                                if session.stopped:
                                    attempt.call_off()
                                    self._learn(attempt)
                                raise
                    self._learn(attempt)
                    return
                except ReaderStalled as stalled:
                    log.info("request %s: paused until its client reads: %s", request_id, stalled)
                    failures.reset()
                    session.recomputed_tokens += session.num_tokens
                except Standstill as standstill:
                    log.warning("request %s: attempt %d is given up: %s", request_id, session.attempts, standstill)
                    _note_failure(session, (), TransferTimeout(str(standstill)))
                    failures.reset()
                except PdserveError as error:
                    # A worker that refuses the request has not failed its hand-off.
                    handoff_failed = attempt.hands_off and not isinstance(error, CapacityExceeded | NotReady)
                    if handoff_failed and self._on_kv_failure == "fail":
                        raise
                    if (final := failures.add(error, attempt, assignment)) is not None:
                        raise final from error
                    log.warning("request %s: attempt %d failed: %s", request_id, session.attempts, error)
                    _note_failure(session, attempt.failed, error)
                    needs_no_transfer = isinstance(error, TransferError) and failures.is_last
                    if handoff_failed and self._on_kv_failure == "recompute":
                        needs_no_transfer = True
                    if needs_no_transfer and self.registry.unavailable(Mode.COLOCATED) is None:
                        mode = Mode.COLOCATED
                session.transition(RequestStatus.QUEUED)
                _forget_attempt(session)
                if failures.in_a_row:
                    await self._pause(session.deadline, failures)
        except (asyncio.CancelledError, GeneratorExit):
            session.end(RequestStatus.FINISHED if session.stopped else RequestStatus.ABORTED)
            raise
        except BaseException:
            session.end(RequestStatus.FAILED)
            raise
        finally:
            self._active[session.holder] -= 1
            if not self._active[session.holder]:
                del self._active[session.holder]

    async def _pause(self, deadline: Deadline, failures: Failures) -> None:
        """Wait before a retry, then until the retry budget allows one."""
        doing, budget, uniform = "waiting for a retry", self._budget, self.chance.uniform
        await deadline.sleep(failures.pause_s * uniform(0.5, 1.5), doing)
        while not budget.take():
            await deadline.sleep(budget.wait_s() + uniform(0.01, 0.1), f"{doing}: too many others are retried")

    async def _place(self, session: Session, mode: WaitMode, order: int, failures: Failures) -> Assignment:
        """Wait for free workers."""
        deadline, request = session.deadline, session.request
        needs = Needs(
            mode,
            session.num_tokens,
            session.tokens_left,
            failures.avoid,
            failures.prefer,
            ticket=next(self._tickets),
            session=request.session_id,
            min_output_tokens=session.min_output_tokens,
            ahead=is_below_share(self._active, session.holder),
        )
        waiting = Waiting(
            order,
            needs,
            session.client,
            session.holder,
            request.priority,
            patient=session.attempts > 0,
            retry=failures.in_a_row > 0,
            prompt=self.registry.prompt(request, session.token_ids),
        )
        if not session.attempts:
            self._line.check_deadline(waiting, deadline.left_s)
        try:
            assignment = await deadline.bound(self._line.wait(waiting), "waiting for a free worker")
        except DeadlineExceeded as error:
            missing = self.registry.unavailable(mode)
            raise error if missing is None else DeadlineExceeded(f"{error}; {missing}") from None
        if self._arrivals.is_burst:
            try:
                await deadline.bound(self._arrivals.settled(), "waiting while other requests were accepted")
            except BaseException:
                assignment.end()
                raise
        # Its workers, too, let it come before others if it has aged, or its client has few.
        priority = min(waiting.priority, request.priority)
        if (priority, needs.ahead) != (request.priority, request.ahead):
            session.request = msgspec.structs.replace(request, priority=priority, ahead=needs.ahead)
        session.placements.append(assignment.reason)
        del session.placements[:-MAX_PLACEMENTS]
        log.debug("request %s: attempt %d: %s", request.request_id, session.attempts + 1, assignment.reason)
        return assignment


def _note_failure(session: Session, workers: Iterable[str], error: PdserveError) -> None:
    session.failures.append(FailedAttempt(", ".join(sorted(workers)), *to_wire(error)))
    del session.failures[:-MAX_PLACEMENTS]


def _forget_attempt(session: Session) -> None:
    """Remove the events of tokens that were not delivered."""
    delivered = len(session.output_token_ids)
    if delivered <= 1:
        session.timeline.forget(_TOKEN_2 if delivered else _ALL_ATTEMPT)
