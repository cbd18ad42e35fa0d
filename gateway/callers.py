"""Who makes a call: the bearer of a token, or anyone if the service has no tokens."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.quota import Quota, TokenLimits
from gateway.token_file import TokenEntry, digest_of, read_token_file
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.core.request import MAX_PRIORITY

log = logging.getLogger(__name__)

_MISSING = (
    "authorization: the call has no bearer token; send the header (over gRPC: metadata) `authorization: Bearer TOKEN`, "
    "with pdserve by --token-file or PDSERVE_TOKEN"
)
_UNKNOWN = "authorization: the token is unknown or has expired"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call, what that caller may still use, and how to find the KV that others of the same name have cached.
    Without tokens all callers have the empty name. ``sees_all``: an operator, who sees the requests of all callers."""

    name: str
    quota: Quota
    shares_cache: bool = True
    sees_all: bool = False

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
            log.error("%s; the tokens of before stay valid", error)
        else:
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
