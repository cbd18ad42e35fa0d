"""A request and its two state tables: end to end (the router's) and inside one engine (the scheduler's).

What happens *inside* a state is not a state but an event (`pdserve.core.timeline`). Both tables are exhaustive: a pair
that is not listed raises `IllegalTransition`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from pdserve.core.sampling import SamplingParams
from pdserve.core.timeline import Timeline


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


@dataclass(slots=True)
class Request:
    """One generation request on its way through the router.

    ``deadline_s`` is a time on the gateway's monotonic clock. ``output_token_ids`` grows as tokens arrive, so that a
    retry can go on from prompt + tokens so far. Cached KV is shared within one ``salt`` only.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: Mode
    deadline_s: float
    timeline: Timeline = field(default_factory=Timeline)
    status: RequestStatus = RequestStatus.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    salt: str = ""

    def transition(self, to: RequestStatus) -> None:
        """Move to ``to``; `IllegalTransition` if the table forbids it."""
        self.status = check_transition(REQUEST_TRANSITIONS, self.status, to)

    @property
    def token_ids_so_far(self) -> tuple[int, ...]:
        """Prompt and outputs: what a worker has to prefill to go on from here."""
        return (*self.prompt_token_ids, *self.output_token_ids)
