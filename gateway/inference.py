"""The service behind both APIs: submissions in, tokens and a final completion out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from gateway.callers import Caller, Callers
from gateway.output_text import OutputText
from gateway.quota import Permit
from gateway.submission import Submission
from gateway.tokenizer import Tokenizer
from gateway.validation import (
    Limits,
    check_logit_bias,
    check_salt,
    check_sampling,
    check_stop_token_ids,
    fit_max_tokens,
    prompt_of,
    request_id_of,
    seeded,
)
from pdserve.core.clock import Clock
from pdserve.core.errors import NotReady, PdserveError
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.logs import bind_request
from pdserve.core.request import Mode, Request
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import GATEWAY, Breakdown, EventKind, Figure
from router.request_record import Deadline, RequestRecord, RoutingResult
from router.router import Router

_EMITTED = (EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call that was admitted: whose it is, when it came, on the gateway's clock, by when it has to end, and the
    client's ``traceparent`` (W3C Trace Context; empty without one)."""

    caller: Caller
    permit: Permit
    received_s: float
    deadline: Deadline
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the output of ``record``. ``text`` is what it adds. ``logprobs`` belong to the token itself, even if
    its text is held back or trimmed. After the ``last`` one comes the completion."""

    record: RequestRecord
    token_id: int
    text: str
    index: int
    last: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Completion:
    """A finished request: its record, where it ran, its whole output, and why that ended."""

    record: RequestRecord
    result: RoutingResult
    output: OutputText
    finish_reason: FinishReason

    @cached_property
    def breakdowns(self) -> Mapping[Figure, Breakdown | None]:
        """The gateway's own breakdown of each figure; None if its token was not written."""
        return {figure: self.record.timeline.breakdown(figure) for figure in Figure}


class ClientLeft(Exception):
    """The client closed the connection of a call."""


class Observer(Protocol):
    """Is told of every request, for metrics or traces. Must not raise."""

    def gap(self, seconds: float) -> None:
        """A token came ``seconds`` after the one before."""
        ...

    def finished(self, completion: Completion, arrival: Arrival) -> None:
        """A request ended with an answer."""
        ...

    def failed(self, error: PdserveError, arrival: Arrival | None) -> None:
        """A call ended with ``error``. Without an ``arrival``, it was not admitted."""
        ...

    def cancelled(self) -> None:
        """A call's client cancelled it."""
        ...


class Inference:
    """``limits`` gives the workers' limits (None: none has registered yet). ``default_timeout_s`` is the deadline of
    calls that bring none."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer | None,
        limits: Callable[[], Limits | None],
        callers: Callers,
        clock: Clock,
        default_timeout_s: float,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.draining: NotReady | None = None
        """The error that refuses new calls; None if they are served."""
        self.in_progress = 0
        """Calls that have been admitted and have not ended."""
        self._router = router
        self._limits = limits
        self._callers = callers
        self._clock = clock
        self._default_timeout_s = default_timeout_s
        self._observers = tuple(observers)
        self.running: dict[str, RequestRecord] = {}
        """Requests whose prompt has been read and that have not ended, by id, the oldest first."""
        self._in_use: set[str] = set()
        self._being_read = 0  # requests whose prompt is being tokenized or waits for it

    def identify(self, authorization: str) -> Caller:
        """Who makes a call with this value of the header ``authorization`` (empty: there is none). `Unauthenticated` if
        it has no valid token and needs one."""
        try:
            return self._callers.identify(authorization)
        except PdserveError as error:
            self._note_failure(error, None)
            raise

    @contextmanager
    def admission(self, caller: Caller, timeout_s: float | None, traceparent: str = "") -> Iterator[Arrival]:
        """Admit a call, which counts as in progress until the context ends, before its message is parsed.
        ``timeout_s`` is the client's (None: the default). Observers are told of the error or the `ClientLeft` that
        ends the context. `NotReady` while draining, `CapacityExceeded` if the queue is full or the caller has reached a
        limit."""
        received_s = self._clock.now()
        permit = Permit(caller.quota)
        try:
            if self.draining is not None:
                raise NotReady(*self.draining.args)
            self._router.arrived(self._being_read)
            permit.take(1)
        except PdserveError as error:
            self._note_failure(error, None)
            raise
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        arrival = Arrival(caller, permit, received_s, Deadline(received_s + timeout_s, self._clock), traceparent)
        self.in_progress += 1
        try:
            yield arrival
        except PdserveError as error:
            self._note_failure(error, arrival)
            raise
        except (asyncio.CancelledError, ClientLeft):
            for observer in self._observers:
                observer.cancelled()
            raise
        finally:
            self.in_progress -= 1
            permit.end()

    def admit_outputs(self, arrival: Arrival, count: int) -> None:
        """Have the ``count`` outputs of a call count as so many requests of its caller. `CapacityExceeded` if they
        exceed a limit."""
        arrival.permit.take(count - 1)  # the call itself counts as the first

    def within(self, arrival: Arrival, timeout_s: float) -> Arrival:
        """``arrival`` with the deadline that the client has set."""
        return replace(arrival, deadline=Deadline(arrival.received_s + timeout_s, self._clock))

    @property
    def known_limits(self) -> Limits | None:
        """The workers' limits; None if no worker has registered yet."""
        return self._limits()

    def limits(self) -> Limits:
        """The workers' limits. The error that says why, if no worker has registered yet."""
        return self._limits_for(Mode.AUTO)

    async def generate(
        self, submission: Submission, arrival: Arrival
    ) -> AsyncGenerator[OutputToken | Completion, None]:
        """The tokens of a request, then its `Completion`. Closing the generator aborts the request on its workers.

        Raises `InvalidRequest` naming the field, `CapacityExceeded`, and what `Router.generate` raises."""
        request_id = request_id_of(submission.request_id, self._in_use)
        bind_request(request_id)
        self._in_use.add(request_id)
        try:
            self._being_read += 1
            try:
                reading = self._read(submission, request_id, arrival)
                request = await arrival.deadline.bound(reading, "its prompt was tokenized")
            finally:
                self._being_read -= 1
            record = RequestRecord(request, arrival.deadline)
            record.timeline.record(EventKind.RECEIVED, GATEWAY, arrival.received_s)
            self.running[request_id] = record
            async with aclosing(self._tokens(record, arrival)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.running.pop(request_id, None)
            self._in_use.discard(request_id)

    def _note_failure(self, error: PdserveError, arrival: Arrival | None) -> None:
        for observer in self._observers:
            observer.failed(error, arrival)

    def _limits_for(self, mode: Mode) -> Limits:
        limits = self._limits()
        if limits is None:
            run_mode = self._router.auto_mode if mode is Mode.AUTO else mode
            raise self._router.registry.unavailable(run_mode) or NotReady("no worker has registered; try again")
        return limits

    async def _read(self, submission: Submission, request_id: str, arrival: Arrival) -> Request:
        check_salt(submission.salt)
        check_sampling(submission.sampling, self.tokenizer)
        limits = self._limits_for(submission.mode)
        check_stop_token_ids(submission.sampling, limits.vocab_size)
        check_logit_bias(submission.sampling, limits.vocab_size)
        prompt = await prompt_of(submission, self.tokenizer, limits)
        sampling = seeded(fit_max_tokens(submission, len(prompt), limits))
        arrival.caller.quota.spend_prompt(len(prompt))
        salt = arrival.caller.salt_of(submission.salt)
        return Request(request_id, prompt, sampling, submission.mode, salt=salt)

    async def _tokens(self, record: RequestRecord, arrival: Arrival) -> AsyncGenerator[OutputToken | Completion, None]:
        request, timeline, now = record.request, record.timeline, self._clock.now
        detokenizer = self.tokenizer.detokenizer(request.prompt_token_ids) if self.tokenizer else None
        output = OutputText(detokenizer, request.sampling.stop)
        finish_reason = FinishReason.ERROR
        timeline.record(EventKind.TOKENIZED, GATEWAY, now())
        generation = self._router.generate(record)
        async with aclosing(generation):
            index, before_s = 0, 0.0
            async for token in generation:
                arrival.caller.quota.spend(1)
                text = output.add(token.token_id)
                if token.finish_reason is not None:
                    finish_reason = token.finish_reason
                    text += output.end()
                if output.stopped:
                    finish_reason = FinishReason.STOP
                now_s = now()
                if index < len(_EMITTED):
                    timeline.record(_EMITTED[index], GATEWAY, now_s)
                if index:
                    for observer in self._observers:
                        observer.gap(now_s - before_s)
                before_s = now_s
                last = output.stopped or token.finish_reason is not None
                yield OutputToken(record, token.token_id, text, index, last, token.logprobs)
                index += 1
                if output.stopped and token.finish_reason is None:
                    await generation.stop()
                    break
        timeline.record(EventKind.FINISHED, GATEWAY, now())
        completion = Completion(record, generation.result, output, finish_reason)
        for observer in self._observers:
            observer.finished(completion, arrival)
        yield completion
