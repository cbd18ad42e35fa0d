"""A call that was admitted, and the request ids that it uses. A call that repeats a running one takes it over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.callers import Caller
from gateway.validation import MAX_PROMPT_LOGPROBS, Submission
from pdserve.core.errors import InvalidRequest
from router.deadline import Deadline

MAX_USER_CHARACTERS = 256  # of a user's name, as far as it tells users apart


@dataclass(slots=True, eq=False)
class AdmittedCall:
    """A call that was admitted."""

    caller: Caller
    received_s: float
    """When it came, on the gateway's clock."""
    deadline: Deadline
    traceparent: str = ""
    """The client's (W3C Trace Context); empty without one."""
    host: str = ""
    """Where it came from."""
    claims: list[Claim] = field(default_factory=list)
    """The request ids that it uses or has used."""
    requests: int = 0
    """As how many requests it counts against the caller's quota, until it ends."""
    has_prompt: bool = False
    """Whether a prompt of it was counted against the caller's quota."""
    prompt_logprobs: int = 0
    """Log-probabilities of prompts that it has asked for."""

    def take(self, requests: int) -> None:
        """Have the call count as so many more requests. `CapacityExceeded` if they exceed a limit."""
        if requests:
            self.caller.quota.take(requests, self.requests)
            self.requests += requests

    def spend_prompt(self, tokens: int) -> None:
        """Count the tokens of a prompt. `CapacityExceeded` if nothing is left for the first one of the call: a call
        may exceed what is left, with all its outputs."""
        if not self.has_prompt:
            self.caller.quota.check_tokens()
            self.has_prompt = True
        self.caller.quota.spend(tokens)

    def tell_prompt(self, tokens: int, likeliest: int | None) -> None:
        """Have the answer contain log-probabilities of so many tokens of a prompt, and of the ``likeliest`` ones beside
        each (None: of none). `InvalidRequest` if they exceed the limit of a call."""
        self.prompt_logprobs += 0 if likeliest is None else tokens * (1 + likeliest)
        if self.prompt_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt: the call asks for {self.prompt_logprobs} log-probabilities of prompts, more than "
                f"{MAX_PROMPT_LOGPROBS}; shorten it, or ask for fewer likeliest tokens or outputs"
            )

    def client(self, user: str = "") -> str:
        """Who takes turns with others: the bearer of the token. Where calls need none, the ``user`` that the call names
        or the host that it came from."""
        return self.caller.name or user[:MAX_USER_CHARACTERS] or self.host


class Claim:
    """The use of a request id by a call, which ``task`` answers."""

    def __init__(self, request_id: str, submission: Submission, task: asyncio.Task[Any] | None) -> None:
        self.request_id = request_id
        self.submission = submission
        self.ended = asyncio.Event()
        """Set when the call has left its workers, and the id is free."""
        self._task = task
        self._cancellations = 0 if task is None else task.cancelling()
        self._taken_over = False

    async def take_over(self) -> None:
        """End the call in favour of a later one. Returns when it has left its workers."""
        if not self._taken_over and self._task is not None:
            self._taken_over = True
            self._task.cancel()
        await self.ended.wait()

    def error(self) -> InvalidRequest | None:
        """The error with which a cancelled call ends if it was cancelled because a later one has taken it over. Called
        once, in the call's own task or in one that awaits it."""
        task = asyncio.current_task()
        if not self._taken_over or task is None:
            return None
        others = task.uncancel() > self._cancellations if task is self._task else task.cancelling() > 0
        if others:  # have cancelled it, too
            return None
        return InvalidRequest(
            f"request_id: a later call has {self.request_id!r} and asks for the same; it gets the answer",
            kind="DuplicateRequest",
        )
