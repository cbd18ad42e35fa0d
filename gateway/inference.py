"""The service behind both APIs: submissions in, tokens and a final completion out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from gateway.admitted_call import AdmittedCall, Claim
from gateway.callers import Caller, Callers
from gateway.output_text import OutputText
from gateway.tokenizer import Tokenizer
from gateway.validation import (
    Limits,
    Submission,
    check_request_id,
    check_resume,
    check_sampling,
    check_short,
    check_token_options,
    end_of,
    fit_max_tokens,
    prompt_of,
    seeded,
)
from pdserve.core.chance import SYSTEM
from pdserve.core.clock import Clock
from pdserve.core.errors import InvalidRequest, NotReady, PdserveError, RequestAborted
from pdserve.core.prefix_digests import keyed_salt
from pdserve.core.request import Mode, Request
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.timeline import GATEWAY, Breakdown, EventKind, Figure
from router.deadline import Deadline
from router.router import Router
from router.session import RoutingResult, Session
from runtime.logs import bind_request

STOPPING = "the service is being stopped; send the request to another one"
_RESUMED_AT_ONCE = 256
"""Tokens of a resumed request that are detokenized without a pause."""
_FIGURES = tuple(Figure)
_EMITTED = (EventKind.TOKEN_1_EMITTED, EventKind.TOKEN_2_EMITTED)


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the output of ``record``. ``text`` is what it adds. ``logprobs`` belong to the token itself, even if
    its text is held back or trimmed. After the ``last`` one comes the completion."""

    record: Session
    token_id: int
    text: str
    index: int
    start: int
    """Characters of the output before its own, shown or not."""
    last: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Completion:
    """A finished request: its session, its whole output, and why that ended."""

    record: Session
    output: OutputText
    finish_reason: FinishReason

    @property
    def result(self) -> RoutingResult:
        """Where it ran, and what that has shown."""
        return self.record.result

    @property
    def mode(self) -> str:
        """Where it ran; empty if it did not."""
        return "" if self.result.mode is None else self.result.mode.value

    @property
    def exposed_ms(self) -> float | None:
        """The part of the KV transfer that was not hidden behind the prefill; None if there was no transfer."""
        timeline, sampled, verified = self.record.timeline, EventKind.TOKEN_1_SAMPLED, EventKind.KV_VERIFIED
        if not (timeline.has(sampled) and timeline.has(verified)):
            return None
        return max(0.0, timeline.gateway_time(verified) - timeline.gateway_time(sampled)) * 1e3

    @cached_property
    def breakdowns(self) -> Mapping[Figure, Breakdown | None]:
        """The gateway's own breakdown of each figure; None if its token was not written."""
        timeline = self.record.timeline
        times_s = timeline.times_s()
        return {figure: timeline.breakdown(figure, times_s=times_s) for figure in _FIGURES}


class Observer:
    """Is told of every request, for metrics or traces. Must not raise."""

    def first(self, record: Session, seconds: float) -> None:
        """Token 1 of a request came ``seconds`` after its call."""

    def gap(self, seconds: float, index: int) -> None:
        """Token number ``index`` of a request (from 0) reached the gateway ``seconds`` after the one before, which says
        nothing about how quickly its client reads."""

    def finished(self, completion: Completion, call: AdmittedCall) -> None:
        """A request ended with an answer."""

    def failed(self, error: PdserveError, call: AdmittedCall | None) -> None:
        """A call ended with ``error``: with `RequestAborted` if its client cancelled it. Without a ``call``, it was
        not admitted."""


class Inference:
    """``limits`` gives the workers' limits (None: none has registered yet). ``default_timeout_s`` is the deadline of
    calls that bring none. ``cache_key`` separates the cached KV of callers; it is the same for all gateways of a
    service."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer | None,
        limits: Callable[[], Limits | None],
        callers: Callers,
        clock: Clock,
        default_timeout_s: float,
        cache_key: bytes,
        observers: Sequence[Observer] = (),
        chance: random.Random = SYSTEM,
    ) -> None:
        self._chance = chance
        self.tokenizer = tokenizer
        self._default_timeout_s = default_timeout_s
        self.draining: NotReady | None = None
        """The error that refuses new calls; None if they are served."""
        self.in_progress = 0
        """Calls that have been admitted and have not ended."""
        self._router = router
        self.known_limits = limits
        self._callers = callers
        self._clock = clock
        self._cache_key = cache_key
        self._observers = tuple(observers)
        self.running: dict[tuple[str, str], Session] = {}
        """Requests whose prompt has been read and that have not ended, by their caller's name and their id, the oldest
        first."""
        self._claims: dict[tuple[str, str], Claim] = {}
        """By the caller's name and the id: callers neither see nor block each other's requests."""
        self._being_read = Counter[str]()  # requests whose prompt is being tokenized or waits for it, by client

    def identify(self, authorization: str) -> Caller:
        """Who makes a call with this value of the header ``authorization`` (empty: there is none). `Unauthenticated` if
        it has no valid token and needs one."""
        try:
            return self._callers.identify(authorization)
        except PdserveError as error:
            self.failed(error)
            raise

    def failed(self, error: PdserveError, call: AdmittedCall | None = None) -> None:
        """Tell the observers of a call that ended with ``error``, without a ``call`` before it was admitted."""
        for observer in self._observers:
            observer.failed(error, call)

    @contextmanager
    def admission(
        self, caller: Caller, timeout_s: float | None, traceparent: str = "", host: str = ""
    ) -> Iterator[AdmittedCall]:
        """Admit a call, which counts as in progress until the context ends, before its message is parsed.
        ``timeout_s`` is the client's (None: the default). Observers are told of the error that ends
        the context. `NotReady` while draining, `CapacityExceeded` if the queue is full or the caller has reached a
        limit."""
        received_s = self._clock.now()
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(received_s + timeout_s, self._clock)
        call = AdmittedCall(caller, received_s, deadline, traceparent, host)
        try:
            if self.draining is not None:
                raise NotReady(*self.draining.args)
            # Its limits come first: a call that exceeds them must not count as an arrival, which can pause streams.
            call.take(1)
            self._router.arrived(caller.name or host, self._being_read)
        except PdserveError as error:
            caller.quota.give_back(call.requests)
            self.failed(error)
            raise
        self.in_progress += 1
        try:
            yield call
        except PdserveError as error:
            self.failed(error, call)
            raise
        except asyncio.CancelledError:
            # It may have reached the call anywhere, also while an answer was being written.
            taken_over = next((each for claim in call.claims if (each := claim.error())), None)
            self.failed(taken_over or RequestAborted("the client cancelled the call"), call)
            if taken_over is None:
                raise
            raise taken_over from None
        finally:
            self.in_progress -= 1
            caller.quota.give_back(call.requests)
            deadline.close()

    def was_read(self) -> None:
        """Note that the message of an admitted call was read. Many in a short time pause running requests."""
        self._router.was_read()

    def within(self, call: AdmittedCall, timeout_s: float) -> None:
        """Set the deadline that the client has given, ``timeout_s`` after the call came."""
        call.deadline.move(call.received_s + timeout_s, self._clock)

    async def limits(self, call: AdmittedCall, mode: Mode = Mode.AUTO) -> Limits:
        """The workers' limits. If no worker has registered yet, waits for one within the call's deadline if the service
        was ready before the gateway was restarted, and else raises the error that says why."""
        doing = "waiting for the service's workers to report to the gateway"
        return await call.deadline.bound(self._await_limits(mode), doing)

    async def generate(
        self, submission: Submission, call: AdmittedCall, task: asyncio.Task[Any] | None = None
    ) -> AsyncGenerator[OutputToken | Completion, None]:
        """The tokens of a request, then its `Completion`. Closing the generator aborts the request on its workers. A
        later call with its id cancels ``task`` (default: the one that iterates).

        Raises `InvalidRequest` naming the field, `CapacityExceeded`, and what `Router.generate` raises."""
        request_id = submission.request_id or f"req-{self._chance.randbytes(16).hex()}"
        key = call.caller.name, request_id
        claim = await self._claim(key, submission, call, task or asyncio.current_task())
        bind_request(request_id)
        try:
            client = call.client()
            self._being_read[client] += 1
            try:
                check_short("salt", submission.salt)
                check_short("session_id", submission.session_id)
                call.caller.quota.check_priority(submission.priority)
                check_sampling(submission.sampling, self.tokenizer)
                limits = await self.limits(call, submission.mode)
                reading = self._read(submission, request_id, call, limits)
                request = await call.deadline.bound(reading, "its prompt was tokenized")
            finally:
                self._being_read[client] -= 1
                if not self._being_read[client]:
                    del self._being_read[client]
            record = Session(
                request,
                call.deadline,
                client=call.client(submission.user),
                holder=client,
                output_token_ids=list(request.output_token_ids),
            )
            record.timeline.record(EventKind.RECEIVED, GATEWAY, call.received_s)
            self.running[key] = record
            detokenizer = self.tokenizer.detokenizer(request.prompt_token_ids) if self.tokenizer else None
            text = OutputText(detokenizer, request.sampling.stop)
            if (ended := await self._resume(record, text)) is not None:
                if request.sampling.prompt_logprobs is not None:
                    await self._compute_prompt(record)
                yield self._completion(Completion(record, text, ended), call)
                return
            async with aclosing(self._tokens(record, text, call)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.running.pop(key, None)
            del self._claims[key]
            claim.ended.set()

    async def _claim(
        self, key: tuple[str, str], submission: Submission, call: AdmittedCall, task: asyncio.Task[Any] | None
    ) -> Claim:
        """Use a request id. If a call uses it and asks for the same, that call ends first: a client whose connection
        broke need not wait until the gateway has noticed. `InvalidRequest` if it asks for something else."""
        _, request_id = key
        check_request_id(request_id)
        while (earlier := self._claims.get(key)) is not None:
            if not submission.asks_the_same(earlier.submission):
                raise InvalidRequest(
                    f"request_id: {request_id!r} is in use by another request; choose another or leave it out",
                    kind="DuplicateRequest",
                )
            await call.deadline.bound(earlier.take_over(), "an earlier call with its request_id ended")
        claim = self._claims[key] = Claim(request_id, submission, task)
        call.claims.append(claim)
        return claim

    async def _await_limits(self, mode: Mode) -> Limits:
        if (limits := self.known_limits()) is not None:
            return limits
        registry, changed = self._router.registry, asyncio.Event()
        run_mode = self._router.auto_mode if mode is Mode.AUTO else mode
        if not registry.was_available(run_mode):
            raise registry.unavailable(run_mode) or NotReady("no worker has registered; try again")
        unsubscribe = registry.subscribe_workers(changed.set)
        try:
            while (limits := self.known_limits()) is None:
                await changed.wait()
                changed.clear()
            return limits
        finally:
            unsubscribe()

    async def _read(self, submission: Submission, request_id: str, call: AdmittedCall, limits: Limits) -> Request:
        check_token_options(submission.sampling, limits.vocab_size)
        prompt = await prompt_of(submission, self.tokenizer, limits, call.client())
        fitted = fit_max_tokens(submission, len(prompt), limits)
        call.tell_prompt(len(prompt), fitted.prompt_logprobs)
        resume = check_resume(submission.resume, fitted, limits)
        sampling = seeded(fitted, request_id)
        call.spend_prompt(len(prompt) + len(resume))  # tokens to resume after are prefilled as well
        salt = keyed_salt(call.caller.salt_of(submission.salt), self._cache_key)
        return Request(
            request_id,
            prompt,
            sampling,
            submission.mode,
            salt=salt,
            output_token_ids=resume,
            priority=submission.priority,
            session_id=submission.session_id,
        )

    async def _resume(self, record: Session, output: OutputText) -> FinishReason | None:
        """Give ``output`` the tokens that the client of a resumed request already has. Returns why the request ended
        with them, if it did: its stream broke before the completion."""
        for count, token_id in enumerate(record.output_token_ids, 1):
            output.add(token_id)
            if count % _RESUMED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have a turn
        limits = self.known_limits()
        if not record.output_token_ids or limits is None:
            return None
        ended = (
            FinishReason.STOP if output.stopped else end_of(record.output_token_ids, record.request.sampling, limits)
        )
        if ended is not None:
            output.end()
        return ended

    async def _compute_prompt(self, record: Session) -> None:
        """Compute the log-probabilities of a prompt whose output is complete."""
        sampling = msgspec.structs.replace(record.request.sampling, max_tokens=1)
        request = msgspec.structs.replace(record.request, sampling=sampling, output_token_ids=())
        alone = Session(request, record.deadline, client=record.client, holder=record.holder)
        async with aclosing(self._router.generate(alone)) as tokens:
            async for _ in tokens:
                record.prompt_logprobs = alone.prompt_logprobs

    async def _tokens(
        self, record: Session, output: OutputText, call: AdmittedCall
    ) -> AsyncGenerator[OutputToken | Completion, None]:
        timeline, now = record.timeline, self._clock.now
        finish_reason: FinishReason | None = None
        timeline.record(EventKind.TOKENIZED, GATEWAY, now())
        async with aclosing(self._router.generate(record)) as tokens:
            index = resumed = len(record.output_token_ids)
            before_s = 0.0
            async for token in tokens:
                call.caller.quota.spend(1 + record.recomputed_tokens)
                was_paused, record.recomputed_tokens = bool(record.recomputed_tokens), 0
                text = output.add(token.token_id)
                if token.finish_reason is not None:
                    text += output.end()
                finish_reason = FinishReason.STOP if output.stopped else token.finish_reason
                now_s = now()
                if index < len(_EMITTED) and not resumed:
                    timeline.record(_EMITTED[index], GATEWAY, now_s)
                if index > resumed:
                    for observer in () if was_paused else self._observers:
                        observer.gap(token.arrived_s - before_s, index)
                elif not resumed:
                    for observer in self._observers:
                        observer.first(record, now_s - call.received_s)
                before_s = token.arrived_s
                last = finish_reason is not None
                yield OutputToken(record, token.token_id, text, index, output.last_start, last, token.logprobs)
                index += 1
                if output.stopped and token.finish_reason is None:
                    record.stopped = True
                    break
        assert finish_reason is not None, "the last token of a request has one"
        yield self._completion(Completion(record, output, finish_reason), call)

    def _completion(self, completion: Completion, call: AdmittedCall) -> Completion:
        """``completion``, of which the observers are told."""
        completion.record.timeline.record(EventKind.FINISHED, GATEWAY, self._clock.now())
        for observer in self._observers:
            observer.finished(completion, call)
        return completion
