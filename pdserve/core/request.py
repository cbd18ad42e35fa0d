"""A request, and the tables of its states: end to end (the router's) and within one engine (the scheduler's).

What happens within a state is an event (`pdserve.core.timeline`). Both tables are exhaustive: a transition that is not
listed is a bug, and raises AssertionError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams


class Mode(StrEnum):
    """Where a request runs: prefill and decode on separate workers (``pd``), both on one worker (``colocated``), or the
    router's choice (``auto``: what is cheaper by the costs measured on the deployment; ``pd`` until these are known,
    and ``colocated`` if workers of a role are missing)."""

    AUTO = "auto"
    PD = "pd"
    COLOCATED = "colocated"


class RequestStatus(StrEnum):
    """The end-to-end state, owned by the router."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class EngineStatus(StrEnum):
    """The state within one engine, owned by its scheduler."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_R, _E = RequestStatus, EngineStatus

REQUEST_TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    _R.QUEUED: frozenset({_R.RUNNING, _R.ABORTED, _R.FAILED}),
    _R.RUNNING: frozenset({_R.QUEUED, _R.FINISHED, _R.ABORTED, _R.FAILED}),
    _R.FINISHED: frozenset(),
    _R.ABORTED: frozenset(),
    _R.FAILED: frozenset(),
}

ENGINE_TRANSITIONS: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    _E.WAITING: frozenset({_E.WAITING_FOR_KV, _E.RUNNING, _E.FINISHED}),
    _E.WAITING_FOR_KV: frozenset({_E.RUNNING, _E.FINISHED}),
    _E.RUNNING: frozenset({_E.PREEMPTED, _E.FINISHED}),
    _E.PREEMPTED: frozenset({_E.RUNNING, _E.FINISHED}),
    _E.FINISHED: frozenset(),
}


S = TypeVar("S", RequestStatus, EngineStatus)


def check_transition(table: Mapping[S, frozenset[S]], current: S, to: S) -> S:
    """Return ``to`` if the table allows it from ``current``; else raise AssertionError."""
    if to not in table[current]:
        raise AssertionError(f"{current} → {to} is not in the table; allowed: {sorted(table[current]) or 'none'}")
    return to


MAX_PRIORITY = 2**31 - 1
"""Limit: `GenerateRequest.priority`, and its negative."""
AGED_S = 10.0
"""A request that has waited for so long may come before requests of an earlier priority, so that no priority starves:
in the gateway's queue (`router.fair_queue`) and on a worker (`engine.scheduling.scheduler`)."""


def check_priority(priority: int) -> int:
    """``priority``; `InvalidRequest` unless a message can hold it."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority: {priority} is not within -{MAX_PRIORITY} and {MAX_PRIORITY}")
    return priority


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A generation request: the same object in gateway, router, worker, and engine.

    ``request_id`` is the client's. ``timeout_s`` is the time left until the request's deadline when it is passed on.
    Cached KV is shared only within one ``salt``. Requests of a lower ``priority`` are served earlier, and lose their
    blocks later. Requests of one ``session_id`` run on the same workers if the routing policy is ``session``. Two
    fields belong to an attempt (see `attempt`): ``attempt_id`` identifies it on the workers, and ``output_token_ids``
    are the tokens of earlier attempts, after which it continues."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: Mode = Mode.AUTO
    timeout_s: float = 0.0
    salt: str = ""
    attempt_id: str = ""
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    session_id: str = ""
    ahead: bool = False
    """Its client has fewer requests in progress than another one: within its priority it is computed first."""

    def attempt(self, attempt_id: str, output_token_ids: Iterable[int], timeout_s: float) -> Request:
        """A copy of this request for one attempt."""
        return msgspec.structs.replace(
            self, attempt_id=attempt_id, output_token_ids=tuple(output_token_ids), timeout_s=timeout_s
        )

    def prefix(self, num_tokens: int, attempt_id: str, timeout_s: float) -> Request:
        """A request for the KV of its first ``num_tokens`` tokens, with an id and a time limit of its own."""
        return msgspec.structs.replace(
            self,
            prompt_token_ids=self.token_ids[:num_tokens],
            output_token_ids=(),
            attempt_id=attempt_id,
            timeout_s=timeout_s,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and outputs so far: the tokens that a worker has to prefill to continue."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of `token_ids`."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens that are still to be generated."""
        return self.sampling.max_tokens - len(self.output_token_ids)


class FailedAttempt(NamedTuple):
    """An attempt that failed: the workers that did (empty: none of them did), and the error's class and text."""

    worker: str
    error: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2,000 requests``: for messages."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
