"""A request and its two state tables: end to end (the router's) and inside one engine (the scheduler's).

What happens *inside* a state is not a state but an event (`pdserve.core.timeline`). Both tables are exhaustive: a pair
that is not listed raises `IllegalTransition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from pdserve.core.sampling import SamplingParams


class Mode(StrEnum):
    """Where a request runs: prefill and decode apart (``pd``), both on one worker (``colocated``), or the router's
    choice (``auto``: ``pd`` where workers of both roles are ready, else ``colocated`` on any ready worker)."""

    AUTO = "auto"
    PD = "pd"
    COLOCATED = "colocated"


class RequestStatus(StrEnum):
    """End to end, owned by the router."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class EngineStatus(StrEnum):
    """Inside one engine, owned by its scheduler."""

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


class IllegalTransition(AssertionError):
    """A state machine was asked for a step its table does not have: a bug in pdserve, never a user's mistake."""


S = TypeVar("S", RequestStatus, EngineStatus)


def check_transition(table: Mapping[S, frozenset[S]], current: S, to: S) -> S:
    """``to``, if the table allows it from ``current``; else `IllegalTransition`."""
    if to not in table[current]:
        raise IllegalTransition(f"{current} → {to} is not in the table; allowed: {sorted(table[current]) or 'none'}")
    return to


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation request: the same object in gateway, router, worker and engine.

    ``request_id`` is the client's. ``timeout_s`` is what is left of the request's deadline when it is handed over.
    Cached KV is shared within one ``salt`` only. What belongs to one attempt (see `attempt`): ``attempt_id`` is its
    name on the workers, and ``output_token_ids`` are the tokens of earlier attempts, from which it goes on.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: Mode = Mode.AUTO
    timeout_s: float = 0.0
    salt: str = ""
    attempt_id: str = ""
    output_token_ids: tuple[int, ...] = ()

    def attempt(self, attempt_id: str, output_token_ids: Iterable[int], timeout_s: float) -> Request:
        """This request as workers get it for one attempt."""
        return msgspec.structs.replace(
            self, attempt_id=attempt_id, output_token_ids=tuple(output_token_ids), timeout_s=timeout_s
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and outputs so far: what a worker has to prefill to go on from here."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """How many `token_ids` there are."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens still wanted."""
        return self.sampling.max_tokens - len(self.output_token_ids)
