"""The requests on a worker. Each is served by one coroutine (a `Handler`), which reads from top to bottom as the
request proceeds."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from contract import control
from contract.engine import Abort, Command, Finished, KVRole, Rejected, Step, Submit, TokenOut
from pdserve.core.config import TransferConfig
from pdserve.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    PdserveError,
    RequestAborted,
    from_wire,
    to_wire,
)
from pdserve.core.handoff import KVPeer
from pdserve.core.kv_layout import KVLayout
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Event, EventKind
from pdserve.core.worker import TokenOutput
from runtime.logs import bind_request
from worker.kv import KVThread
from worker.server import Outbox

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
DEADLINE_GRACE_S = 1.0
"""Limit: time after its deadline that a request may stay on a worker. Then: its blocks are freed."""


class EngineResources(NamedTuple):
    """What all requests of one incarnation share. ``command`` sends a command to the engine, which is ignored once the
    engine has ended."""

    command: Callable[[Command], None]
    kv: KVThread
    layout: KVLayout
    vocab_size: int
    transfer: TransferConfig


class Sampled(NamedTuple):
    """A token, and the step that sampled it."""

    token: TokenOut
    step: Step


class ServedRequest:
    """One request, for the coroutine that serves it. ``received_s`` is the time at which its call ``work`` arrived, on
    the worker's clock."""

    def __init__(
        self, work: control.Work, resources: EngineResources, outbox: Outbox, *, worker_id: str, received_s: float
    ) -> None:
        request = work.request
        self.request, self.attempt_id, self.resources, self.outbox = request, request.attempt_id, resources, outbox
        self.worker_id, self.received_s = worker_id, received_s
        self._peer = None if isinstance(work, control.Run) else work.peer
        self.tells_ready = isinstance(work, control.Receive) and work.tell_ready
        self.prefix_source = work.prefix_source if isinstance(work, control.Run | control.Push) else None
        # What this worker computes of its prompt, and samples at most (0: token 1 alone).
        self._prompt_tokens = request.num_tokens if isinstance(work, control.Run | control.Push) else 0
        self._output_tokens = request.max_tokens if isinstance(work, control.Run | control.Receive) else 0
        self._arrived: deque[Sampled | PdserveError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._forwards = False
        self._sampled = 0
        self.is_over = False
        """It has its last token or its error. It may still hold resources."""
        self.timer: asyncio.TimerHandle | None = None  # its deadline's
        self.task: asyncio.Task[None] | None = None  # which serves it

    def outstanding(self) -> tuple[int, int]:
        """Tokens that are still to be computed here, and how many of them are of its prompt."""
        prompt_tokens = 0 if self._sampled else self._prompt_tokens
        return prompt_tokens + max(0, self._output_tokens - self._sampled), prompt_tokens

    @property
    def peer(self) -> KVPeer:
        """The worker at the other end of the hand-off."""
        assert self._peer is not None, "this request has no hand-off"
        return self._peer

    @property
    def deadline_s(self) -> float:
        """The time by which the request must end, on the worker's clock."""
        return self.received_s + self.request.timeout_s

    def submit(self, kv_role: KVRole) -> None:
        """Submit the request to the engine."""
        prefix_tokens = 0 if self.prefix_source is None else self.prefix_source.num_tokens
        self.resources.command(Submit(self.request, kv_role, prefix_tokens))

    async def sampled(self) -> Sampled:
        """Wait for the next token of this request. Raises the error that ends the request."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._arrived.popleft()
        if isinstance(item, PdserveError):
            raise item
        return item

    async def forward_rest(self) -> None:
        """Forward all further tokens to the gateway as they come. Returns after the last one."""
        while self._arrived:
            if self._forward((await self.sampled()).token):
                return
        self._forwards = True
        await self.sampled()  # the last one ends the forwarding

    def tell(
        self,
        sampled: Sampled,
        *events: Event,
        finish_reason: FinishReason | None = None,
        **more: Any,
    ) -> None:
        """Send a token to the gateway, with ``events`` and further fields of `TokenOutput`."""
        token = sampled.token
        self.outbox.output(
            self.attempt_id,
            TokenOutput(
                token.token_id,
                finish_reason,
                events,
                logprobs=token.logprobs,
                prompt_logprobs=token.prompt_logprobs,
                draft_tokens=token.draft_tokens,
                accepted_draft_tokens=token.accepted_draft_tokens,
                **more,
            ),
        )

    def event(self, kind: EventKind, time_s: float) -> Event:
        """An event of this worker at ``time_s`` of its clock."""
        return Event(kind, self.worker_id, time_s)

    def prefill_events(self, first: Sampled) -> tuple[Event, ...]:
        """The events of the prefill, once token 1 has been sampled."""
        return (
            self.event(EventKind.PREFILL_RECEIVED, self.received_s),
            self.event(EventKind.PREFILL_SCHEDULED, first.token.first_scheduled_s),
            self.event(EventKind.TOKEN_1_SAMPLED, first.step.sampled_s),
        )

    def token_2_events(self, second: Sampled, scheduled_s: float) -> tuple[Event, ...]:
        """The events of the step that sampled token 2; the first step with this request was scheduled at
        ``scheduled_s``."""
        step, events = second.step, [self.event(EventKind.DECODE_SCHEDULED, scheduled_s)]
        if step.drafted_s is not None and step.step_started_s == scheduled_s:  # else it computed its prompt before
            events.append(self.event(EventKind.DRAFTED, step.drafted_s))
        return *events, self.event(EventKind.TOKEN_2_SAMPLED, step.sampled_s)

    # --- for the table and for hand-offs -----------------------------------------------------------------------------

    def on_token(self, token: TokenOut, step: Step) -> None:
        """Take a token of a step."""
        self._sampled += 1
        if not self._forwards or self._forward(token):
            self._put(Sampled(token, step))

    def on_handoff_end(self, done: asyncio.Future[Any]) -> None:
        """Have `sampled` raise the error of a hand-off that has ended."""
        if not done.cancelled() and isinstance(error := done.exception(), PdserveError):
            self.on_error(error)

    def on_error(self, error: PdserveError) -> None:
        """Have `sampled` raise ``error`` after the tokens that have arrived."""
        self._put(error)

    def _put(self, item: Sampled | PdserveError) -> None:
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _forward(self, token: TokenOut) -> bool:
        """Send a token to the gateway. Returns whether it was the last one."""
        reason = finish_reason(token)
        output = TokenOutput(
            token.token_id,
            reason,
            logprobs=token.logprobs,
            draft_tokens=token.draft_tokens,
            accepted_draft_tokens=token.accepted_draft_tokens,
        )
        self.outbox.output(self.attempt_id, output)
        return reason is not None


Handler = Callable[[ServedRequest], Coroutine[Any, Any, None]]
"""A coroutine that serves a request. It raises the PdserveError that ends the request."""


class RequestTable:
    """All requests of a worker, by attempt id. Each ends with its last token, an error that is sent to the gateway, or
    an abort, and stays until its resources are released."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._requests: dict[str, ServedRequest] = {}

    def __contains__(self, attempt_id: str) -> bool:
        """Whether the request is being served, or still holds resources."""
        return attempt_id in self._requests

    def _running(self, attempt_id: str) -> ServedRequest | None:
        served = self._requests.get(attempt_id)
        return None if served is None or served.is_over else served

    def outstanding(self, gateway_epoch: str) -> tuple[int, int, int]:
        """The number of requests of other gateways than the one of this epoch, and sums of `ServedRequest.outstanding`
        over them."""
        each = [
            served.outstanding()
            for served in self._requests.values()
            if not served.is_over and served.outbox.gateway_epoch != gateway_epoch
        ]
        return len(each), sum(tokens for tokens, _ in each), sum(prompt_tokens for _, prompt_tokens in each)

    def begin(self, served: ServedRequest, handler: Handler) -> None:
        """Serve a new request."""
        attempt_id, loop = served.attempt_id, asyncio.get_running_loop()
        self._requests[attempt_id] = served
        served.timer = loop.call_later(
            served.request.timeout_s + DEADLINE_GRACE_S,
            self.fail,
            served,
            DeadlineExceeded(f"request {attempt_id} exceeded its deadline on worker {self._worker_id}"),
        )
        served.task = loop.create_task(self._serve(served, handler))
        served.task.add_done_callback(lambda _: self._requests.pop(attempt_id, None))

    async def _serve(self, served: ServedRequest, handler: Handler) -> None:
        complete = False
        bind_request(served.request.request_id, served.attempt_id)
        try:
            await handler(served)
            complete = True
        except PdserveError as error:
            self._end(served, error)
        except Exception as error:
            log.exception("%s: request %s", self._worker_id, served.attempt_id)
            self._end(served, from_wire(*to_wire(error)))
        finally:
            if not complete:
                served.resources.command(Abort(served.attempt_id))
            self._end(served)

    def fail(self, served: ServedRequest, error: PdserveError) -> None:
        """End a request with ``error``. The gateway gets the error at once, and the coroutine releases the
        resources."""
        if not served.is_over:
            self._end(served, error)
            assert served.task is not None, "it has begun"
            served.task.cancel()

    def fail_all(self, error: Callable[[], PdserveError]) -> None:
        """End all requests."""
        for served in list(self._requests.values()):
            self.fail(served, error())

    async def abort(self, attempt_id: str) -> None:
        """Abort a request. Returns when its resources are released, or after `CLOSE_TIMEOUT_S`. Unknown ids are
        ignored."""
        if (served := self._requests.get(attempt_id)) is not None and served.task is not None:
            self.fail(served, RequestAborted(f"request {attempt_id} was aborted"))
            await asyncio.wait({served.task}, timeout=CLOSE_TIMEOUT_S)

    def abort_all(self, outbox: Outbox) -> None:
        """Abort all requests that came over the stream of ``outbox``, because the stream has ended."""
        for served in [each for each in self._requests.values() if each.outbox is outbox]:
            self.fail(served, RequestAborted("the gateway's control stream ended"))

    async def settled(self) -> None:
        """Wait until no coroutine runs, at most `CLOSE_TIMEOUT_S`. No new requests may begin meanwhile."""
        if tasks := [served.task for served in self._requests.values() if served.task is not None]:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    # --- engine events -----------------------------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """Pass a step's tokens to their requests."""
        for token in step.tokens:
            if (served := self._running(token.attempt_id)) is not None:
                served.on_token(token, step)

    def on_rejected(self, rejected: Rejected) -> None:
        """Fail a request that the engine refuses."""
        if (served := self._running(rejected.attempt_id)) is not None:
            self.fail(served, from_wire(rejected.kind, rejected.message))

    def on_finished(self, finished: Finished) -> None:
        """Fail a request that the engine ended because of token 1, which it did not sample. The prefill worker would
        have ended the request by this token, so the end-of-sequence ids of the two workers differ."""
        if (served := self._running(finished.attempt_id)) is not None:
            why = f"request {finished.attempt_id}: token 1 ends it on worker {self._worker_id}"
            served.on_error(
                LayoutMismatch(
                    f"{why} ({finished.finish_reason}) and not where it was sampled; all workers of a service must run "
                    "a model with the same eos_token_ids"
                )
            )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _end(self, served: ServedRequest, error: PdserveError | None = None) -> None:
        """Note that a request is over, and send ``error`` to its gateway. The first call counts."""
        if served.is_over:
            return
        served.is_over = True
        assert served.timer is not None, "it has begun"
        served.timer.cancel()
        if error is not None and not isinstance(error, RequestAborted):
            # The message about a wrong field may quote it.
            shown = type(error).__name__ if isinstance(error, InvalidRequest) else error
            log.warning("%s: request %s failed: %s", self._worker_id, served.attempt_id, shown)
            served.outbox.error(served.attempt_id, error)


def finish_reason(token: TokenOut) -> FinishReason | None:
    """The engine's finish reason as `FinishReason`; None while the request goes on."""
    return FinishReason(token.finish_reason) if token.finish_reason else None
