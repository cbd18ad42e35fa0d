"""A request in the router: its deadline, its progress, and its result."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineExceeded
from pdserve.core.handoff import PrefixFetch, TransferProof
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import REQUEST_TRANSITIONS, Mode, Request, RequestStatus, check_transition
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Timeline

T = TypeVar("T")


class Deadline:
    """A deadline at ``deadline_s`` on ``clock``, converted to the event loop's clock. One timer ends all waits for
    which it has come, so that a request may have many short ones. `close` stops the timer."""

    __slots__ = ("_loop", "_timer", "_until", "_waits")

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waits: dict[asyncio.Task[Any], _Wait] = {}  # the innermost wait of each task
        self.move(deadline_s, clock)

    def move(self, deadline_s: float, clock: Clock) -> None:
        """Set another deadline, while nothing waits for this one."""
        self.close()
        self._until = self._loop.time() + deadline_s - clock.now()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._until - self._loop.time())

    async def bound(self, awaitable: Awaitable[T], doing: str) -> T:
        """Await ``awaitable``, in a task. `DeadlineExceeded` at the deadline, with what the request was ``doing``; an
        awaitable is not begun after it."""
        task = asyncio.current_task()
        assert task is not None, "it is called in a task"
        if self._timer is None:
            if self._until <= self._loop.time():
                if asyncio.iscoroutine(awaitable):
                    awaitable.close()
                raise self._exceeded(doing)
            self._timer = self._loop.call_at(self._until, self._end)
        waits = self._waits
        wait = waits[task] = _Wait(task, waits.get(task))
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not wait.ended:
                raise
            wait.ended = False
            if task.uncancel() > wait.cancellations:  # others have cancelled the task, too
                raise
            raise self._exceeded(doing) from None
        finally:
            if wait.ended:  # it has come to its own end meanwhile
                task.uncancel()
            if wait.outer is None:
                del waits[task]
            else:
                waits[task] = wait.outer

    async def sleep(self, seconds: float, doing: str) -> None:
        """Sleep, but not past the deadline."""
        if seconds > 0:
            await self.bound(asyncio.sleep(seconds), doing)

    def close(self) -> None:
        """Stop the timer, until the next wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        for task, wait in self._waits.items():
            wait.ended = True
            task.cancel()

    @staticmethod
    def _exceeded(doing: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"deadline: it passed while {doing}; raise the timeout or reduce the load")


class _Wait:
    """A wait of a task until a deadline. ``outer``: the wait of the same task and deadline that it is a part of.
    ``cancellations``: of the task by others, when it began. ``ended``: the deadline has cancelled the task."""

    __slots__ = ("cancellations", "ended", "outer")

    def __init__(self, task: asyncio.Task[Any], outer: _Wait | None) -> None:
        self.cancellations = task.cancelling()
        self.outer = outer
        self.ended = False


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request and its progress. ``output_token_ids`` grows as tokens arrive, so that a retry continues after them.
    ``placements`` describe the workers of each attempt and the reason for the choice. ``client``: who takes
    turns with others in the queue. ``holder``: whose share of the queue it takes (empty: the client's).
    ``recomputed_tokens``: prefilled again because its client left tokens unread."""

    request: Request
    deadline: Deadline
    timeline: Timeline = field(default_factory=Timeline)
    status: RequestStatus = RequestStatus.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    placements: list[str] = field(default_factory=list)
    client: str = ""
    holder: str = ""
    recomputed_tokens: int = 0

    def __post_init__(self) -> None:
        self.holder = self.holder or self.client

    def transition(self, to: RequestStatus) -> None:
        """Change the status to ``to``. AssertionError if the table forbids it."""
        self.status = check_transition(REQUEST_TRANSITIONS, self.status, to)

    def next_attempt(self) -> Request:
        """Return the request for the next attempt. Its attempt id is unique even if a client uses a request id again,
        so that late outputs of an earlier attempt are not mistaken for outputs of this one."""
        attempt_id = f"{self.request.request_id}#{secrets.token_hex(4)}"
        return self.request.attempt(attempt_id, self.output_token_ids, self.deadline.left_s)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt and the outputs so far."""
        prompt = self.request.prompt_token_ids
        return (*prompt, *self.output_token_ids) if self.output_token_ids else prompt

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the outputs so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def tokens_left(self) -> int:
        """Tokens still wanted."""
        return self.request.sampling.max_tokens - len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class RoutedToken:
    """A token for the client, which reached the router at ``arrived_s`` on its clock. The last token has a finish
    reason."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None
    arrived_s: float


@dataclass(slots=True)
class RoutingResult:
    """The result of a request, complete after its last token.

    ``decode_worker``: empty if there was no hand-off.
    ``kv_bytes_expected``: KV bytes that the hand-off of the last attempt has to move; 0 if there was none, or if the
    client stopped before decode gave a token.
    ``prefill_cached_tokens``: tokens of the prompt that were not computed where it was prefilled, because the prefix
    cache there held them or ``prefix_fetch`` brought them from another worker's (None: nothing was fetched).
    ``prefix_bytes_expected``: KV bytes of the tokens that were fetched, by arithmetic.
    """

    mode: Mode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    proof: TransferProof | None = None
    kv_bytes_expected: int = 0
    block_size: int = 0
    attempts: int = 0
    prefill_cached_tokens: int = 0
    prefix_fetch: PrefixFetch | None = None
    prefix_bytes_expected: int = 0
