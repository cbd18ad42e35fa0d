"""One request's way through the router, retries included."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from core.clock import Clock
from core.config import KVFailurePolicy, RouterConfig
from core.errors import PdserveError
from core.request import REQUEST_TRANSITIONS, Mode, Request, RequestStatus
from core.timeline import EventKind
from router.attempt import Attempt
from router.deadline import Deadline
from router.registry import WorkerRegistry
from router.routed import RoutedToken, RoutingResult
from router.waiting_line import Placement, RunMode, Waiting, WaitingLine

log = logging.getLogger(__name__)

_BEFORE_ROUTER = frozenset({EventKind.RECEIVED, EventKind.TOKENIZED})
_ALL_ATTEMPT = frozenset(EventKind) - _BEFORE_ROUTER
_TOKEN_2 = frozenset(
    {EventKind.KV_VERIFIED, EventKind.DECODE_SCHEDULED, EventKind.TOKEN_2_SAMPLED, EventKind.TOKEN_2_ARRIVED}
)


class Generation:
    """The tokens of a request as an async iterator (use ``contextlib.aclosing``), and what became of it in `result`.

    Closing it, or cancelling whoever reads it, aborts the request on its workers.
    """

    def __init__(
        self,
        request: Request,
        order: int,
        line: WaitingLine,
        registry: WorkerRegistry,
        config: RouterConfig,
        clock: Clock,
        delay_s: Mapping[str, float],
        auto_mode: RunMode,
        on_kv_failure: KVFailurePolicy,
        on_active: Callable[[int], None],
    ) -> None:
        self.request = request
        self.result = RoutingResult()
        self._order = order
        self._line = line
        self._registry = registry
        self._config = config
        self._clock = clock
        self._delay_s = delay_s
        self._mode: RunMode = auto_mode if request.mode is Mode.AUTO else request.mode
        self._on_kv_failure = on_kv_failure
        self._on_active = on_active
        self._stopped = False
        self._attempt: Attempt | None = None
        self._tokens = self._generate()

    def __aiter__(self) -> AsyncGenerator[RoutedToken, None]:
        return self._tokens

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        await self._tokens.aclose()

    async def stop(self) -> None:
        """The client needs no more tokens: end the request here and on its workers as finished."""
        self._stopped = True
        if self._attempt is not None:
            self._attempt.call_off()
        await self.aclose()

    async def _generate(self) -> AsyncGenerator[RoutedToken, None]:
        request = self.request
        self._on_active(+1)
        try:
            deadline = Deadline(request.deadline_s, self._clock)
            await deadline.sleep(self._delay_s.get("route", 0.0), "it waited to be routed")
            avoid: frozenset[str] = frozenset()
            prefer = ""
            while True:
                placement = await self._place(deadline, avoid, prefer)
                request.transition(RequestStatus.RUNNING)
                request.attempts += 1
                attempt = Attempt(request, placement, self.result, self._registry, self._clock, deadline, self._delay_s)
                self._attempt = attempt
                try:
                    async with attempt, aclosing(attempt.tokens()) as tokens:
                        async for token in tokens:
                            if token.finish_reason is not None:
                                request.transition(RequestStatus.FINISHED)
                            yield token
                    return
                except PdserveError as error:
                    if not error.retryable or request.attempts >= self._config.max_attempts or not deadline.left_s:
                        raise
                    if attempt.hands_off and self._on_kv_failure == "fail":
                        raise
                    log.warning("request %s: attempt %d failed: %s", request.request_id, request.attempts, error)
                if attempt.hands_off and self._on_kv_failure == "recompute":
                    self._mode = Mode.COLOCATED
                avoid |= attempt.failed
                prefer = placement.prefill.worker.worker_id
                request.transition(RequestStatus.QUEUED)
                self._forget_attempt()
        except (asyncio.CancelledError, GeneratorExit):
            self._end(RequestStatus.FINISHED if self._stopped else RequestStatus.ABORTED)
            raise
        except BaseException:
            self._end(RequestStatus.FAILED)
            raise
        finally:
            self._on_active(-1)

    async def _place(self, deadline: Deadline, avoid: frozenset[str], prefer: str) -> Placement:
        request = self.request
        waiting = Waiting(
            self._order,
            self._mode,
            prompt_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            output_tokens=request.sampling.max_tokens - len(request.output_token_ids),
            patient=request.attempts > 0,
            avoid=avoid,
            prefer=prefer,
        )
        return await deadline.bound(self._line.place(waiting), "waiting for a free worker")

    def _forget_attempt(self) -> None:
        """Events of tokens that were delivered stay, those of tokens that never came go."""
        delivered = len(self.request.output_token_ids)
        if delivered <= 1:
            self.request.timeline.forget(_TOKEN_2 if delivered else _ALL_ATTEMPT)

    def _end(self, status: RequestStatus) -> None:
        if status in REQUEST_TRANSITIONS[self.request.status]:
            self.request.transition(status)
