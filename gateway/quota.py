"""What the bearer of a token may use, and has used: requests and tokens per minute, and requests at the same time."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, InvalidRequest
from pdserve.core.request import check_priority, counted_requests

STREAM_RETRY_S = 1.0
"""When to come back after a refusal for too many requests at once, whose ends cannot be predicted."""
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6

_Limit = Annotated[int, Field(ge=1, strict=True)]


class TokenLimits(BaseModel):
    """Limits of one token; None is unlimited. ``tokens_per_minute`` counts tokens of prompts and outputs.
    ``min_priority`` is the lowest, hence earliest, priority of requests: by default that of requests without one, so
    that only tokens that name a lower value may go before others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent: _Limit | None = None
    min_priority: Annotated[int, Field(strict=True)] = 0


class _Meter:
    """What was spent, less what a constant rate has made up for since. So a minute's allowance may be spent at once,
    and is there again a minute later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent = 0.0
        self._settled_s = clock.now()

    def spend(self, amount: int, per_minute: int) -> None:
        """Spend ``amount``, even if it is more than there is left."""
        self._settle(per_minute)
        self._spent += amount

    def wait_s(self, amount: int, per_minute: int) -> float:
        """Time until ``amount`` is left; 0 if it is."""
        self._settle(per_minute)
        wait_s = (self._spent + amount - per_minute) / per_minute * _MINUTE_S
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def _settle(self, per_minute: int) -> None:
        now_s = self._clock.now()
        self._spent = max(0.0, self._spent - (now_s - self._settled_s) / _MINUTE_S * per_minute)
        self._settled_s = now_s


class Quota:
    """The limits of one token, which may be changed at any time, and what was used of them. Tokens are counted when
    they are known, so a request may exceed what is left; the next one waits until that is made up for."""

    def __init__(self, limits: TokenLimits, clock: Clock) -> None:
        self.limits = limits
        self.running = 0
        """Requests that run now."""
        self._requests = _Meter(clock)
        self._tokens = _Meter(clock)

    def take(self, requests: int, held: int = 0) -> None:
        """Count the beginning of ``requests`` of a call that has ``held`` others. `CapacityExceeded`, which names the
        limit, if they exceed it; nothing is counted then."""
        limits = self.limits
        if (most := limits.concurrent) is not None and self.running + requests > most:
            retry_after_s = STREAM_RETRY_S if held + requests <= most else None
            raise self._exceeded("concurrent", f"{counted_requests(most)} at the same time", retry_after_s)
        most = limits.requests_per_minute
        if most is not None and (wait_s := self._requests.wait_s(requests, most)):
            retry_after_s = wait_s if held + requests <= most else None
            raise self._exceeded("requests_per_minute", f"{counted_requests(most)} per minute", retry_after_s)
        self._check_tokens()
        if limits.requests_per_minute is not None:
            self._requests.spend(requests, limits.requests_per_minute)
        self.running += requests

    def give_back(self, requests: int) -> None:
        """Count the end of ``requests``."""
        self.running -= requests

    def spend_prompt(self, tokens: int) -> None:
        """Count the tokens of a prompt. `CapacityExceeded` if nothing is left for it by now."""
        self._check_tokens()
        self.spend(tokens)

    def spend(self, tokens: int) -> None:
        """Count tokens that were read or generated."""
        if self.limits.tokens_per_minute is not None:
            self._tokens.spend(tokens, self.limits.tokens_per_minute)

    def check_priority(self, priority: int) -> None:
        """`InvalidRequest` if the token does not allow this priority."""
        check_priority(priority)
        if priority < (lowest := self.limits.min_priority):
            raise InvalidRequest(f"priority: {priority} is below {lowest}, the lowest that the token allows; raise it")

    def _check_tokens(self) -> None:
        most = self.limits.tokens_per_minute
        if most is not None and (wait_s := self._tokens.wait_s(1, most)):
            raise self._exceeded("tokens_per_minute", f"{most} tokens per minute", wait_s)

    def _exceeded(self, limit: str, what: str, retry_after_s: float | None) -> CapacityExceeded:
        remedy = "ask for less at a time" if retry_after_s is None else "come back later"
        return CapacityExceeded(f"{limit}: the token allows {what}; {remedy}", retry_after_s=retry_after_s)


class Permit:
    """Requests of one call, which count against a quota until its `end`."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._requests = 0

    def take(self, requests: int) -> None:
        """See `Quota.take`."""
        if requests:
            self._quota.take(requests, self._requests)
            self._requests += requests

    def end(self) -> None:
        """Give everything back."""
        self._quota.give_back(self._requests)
