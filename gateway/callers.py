"""Who makes a call, and what that caller may use: the bearer of a token, or anyone if the service has no tokens."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.token_file import TokenEntry, TokenLimits, digest_of, read_token_file
from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, ConfigError, InvalidRequest, Unauthenticated
from pdserve.core.request import MAX_PRIORITY, check_priority, counted

log = logging.getLogger(__name__)

_MISSING = (
    "authorization: the call has no bearer token; send the header (over gRPC: metadata) `authorization: Bearer TOKEN`, "
    "with pdserve by --token-file or PDSERVE_TOKEN"
)
_UNKNOWN = "authorization: the token is unknown or has expired"

STREAM_RETRY_S = 1.0
"""When to come back after a refusal for too many requests at once, whose ends cannot be predicted."""
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6


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
            raise self._exceeded("concurrent", f"{counted(most, 'request')} at the same time", retry_after_s)
        most = limits.requests_per_minute
        if most is not None and self._requests.wait_s(requests, most):
            # The call counts anew when it is sent again, with what it holds now.
            retry_after_s = self._requests.wait_s(held + requests, most) if held + requests <= most else None
            raise self._exceeded("requests_per_minute", f"{counted(most, 'request')} per minute", retry_after_s)
        self.check_tokens()
        if limits.requests_per_minute is not None:
            self._requests.spend(requests, limits.requests_per_minute)
        self.running += requests

    def give_back(self, requests: int) -> None:
        """Count the end of ``requests``."""
        self.running -= requests

    def spend(self, tokens: int) -> None:
        """Count tokens that were read or generated."""
        if self.limits.tokens_per_minute is not None:
            self._tokens.spend(tokens, self.limits.tokens_per_minute)

    def check_priority(self, priority: int) -> None:
        """`InvalidRequest` if the token does not allow this priority."""
        check_priority(priority)
        if priority < (lowest := self.limits.min_priority):
            raise InvalidRequest(f"priority: {priority} is below {lowest}, the lowest that the token allows; raise it")

    def check_tokens(self) -> None:
        """`CapacityExceeded` if no tokens are left."""
        most = self.limits.tokens_per_minute
        if most is not None and (wait_s := self._tokens.wait_s(1, most)):
            raise self._exceeded("tokens_per_minute", f"{most} tokens per minute", wait_s)

    def _exceeded(self, limit: str, what: str, retry_after_s: float | None) -> CapacityExceeded:
        remedy = "ask for less at a time" if retry_after_s is None else "come back later"
        return CapacityExceeded(f"{limit}: the token allows {what}; {remedy}", retry_after_s=retry_after_s)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call. Without tokens all callers have the empty name."""

    name: str
    quota: Quota
    shares_cache: bool = True
    sees_all: bool = False  # an operator, who sees the requests of all callers

    def salt_of(self, salt: str) -> str:
        """The salt under which KV of a request with ``salt`` is cached. Names have no slash, so that two callers never
        have the same."""
        return salt if self.shares_cache else f"{self.name}/{salt}"


class Callers:
    """Knows callers by their tokens. ``path`` is the file with the tokens; None: calls need none. ``wall_s`` gives the
    seconds since 1970.

    `ConfigError` if the file cannot be used. Later it is read again when it changes; a version that cannot be used is
    logged, and the tokens of before stay valid."""

    def __init__(self, path: Path | None, clock: Clock, wall_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._wall_s = wall_s
        self._anyone = Caller("", Quota(TokenLimits(min_priority=-MAX_PRIORITY), clock), sees_all=True)
        self._known: list[tuple[TokenEntry, bytes, Caller]] = []
        self._seen: tuple[int, ...] | None = None
        self._problem = ""
        if path is not None:
            self._seen = _version(path)
            self._read(path)

    def identify(self, authorization: str) -> Caller:
        """The caller with this value of the header ``authorization`` (empty: there is none). `Unauthenticated` if it
        has no valid token. The time that this takes does not depend on how much of a token is right."""
        if self._path is None:
            return self._anyone
        self._read_again(self._path)
        scheme, _, token = authorization.partition(" ")
        given = digest_of(token.strip())
        found: tuple[TokenEntry, Caller] | None = None
        for entry, digest, caller in self._known:  # to the end, wherever it is found
            if hmac.compare_digest(digest, given):
                found = entry, caller
        if found is None or scheme.lower() != "bearer" or self._has_expired(found[0]):
            raise Unauthenticated(_UNKNOWN if authorization else _MISSING)
        return found[1]

    def problem(self) -> str:
        """Why the file as it is now cannot be used; empty if it can."""
        if self._path is not None:
            self._read_again(self._path)
        return self._problem

    def _has_expired(self, entry: TokenEntry) -> bool:
        return entry.expires is not None and self._wall_s() >= entry.expires.timestamp()

    def _read_again(self, path: Path) -> None:
        version = _version(path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._read(path)
        except ConfigError as error:
            self._problem = f"{error}; the tokens of before stay valid"
            log.error("%s", self._problem)
        else:
            self._problem = ""
            log.info("%s was read again: %d tokens", path, len(self._known))

    def _read(self, path: Path) -> None:
        """Take the tokens of the file. Names that were there before keep what they have used."""
        file = read_token_file(path)
        quotas = {caller.name: caller.quota for _, _, caller in self._known}
        known = []
        for entry in file.tokens:
            quota = quotas.get(entry.name) or Quota(entry.limits, self._clock)
            quota.limits = entry.limits
            caller = Caller(entry.name, quota, file.shared_cache, entry.operator)
            known.append((entry, entry.digest, caller))
        self._known = known


def _version(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file does; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
