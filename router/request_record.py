"""A request in the router: its deadline, its progress, and its result."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineExceeded
from pdserve.core.handoff import TransferProof
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import REQUEST_TRANSITIONS, Mode, Request, RequestStatus, check_transition
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Timeline

T = TypeVar("T")


class Deadline:
    """A deadline at ``deadline_s`` on ``clock``, converted to the event loop's clock."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + deadline_s - clock.now()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._until - self._loop.time())

    async def bound(self, awaitable: Awaitable[T], doing: str) -> T:
        """Await ``awaitable``. `DeadlineExceeded` at the deadline, with what the request was ``doing``."""
        try:
            async with asyncio.timeout_at(self._until):
                return await awaitable
        except TimeoutError:
            raise DeadlineExceeded(f"deadline: it passed while {doing}; raise the timeout or reduce the load") from None

    def guard(self, doing: str) -> Guard:
        """Bounds many short waits with one timer. Close it."""
        return Guard(self._loop, self._until, doing)

    async def sleep(self, seconds: float, doing: str) -> None:
        """Sleep, but not past the deadline."""
        if seconds > 0:
            await self.bound(asyncio.sleep(seconds), doing)


class Guard:
    """Awaits one thing after another, as `Deadline.bound` does, at less cost: a timer is set once and not for each."""

    __slots__ = ("_doing", "_fired", "_over", "_task", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, until: float, doing: str) -> None:
        self._doing = doing
        self._over = self._fired = False
        self._task: asyncio.Task[Any] | None = None
        self._timer = loop.call_at(until, self._end)

    async def bound(self, awaitable: Awaitable[T]) -> T:
        """Await ``awaitable``. `DeadlineExceeded` at the deadline. One call at a time."""
        if not self._over:
            self._task = asyncio.current_task()
            try:
                return await awaitable
            except asyncio.CancelledError:
                if not self._fired or self._task is None or self._task.uncancel() > 0:
                    raise
            finally:
                self._task = None
        elif asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise DeadlineExceeded(f"deadline: it passed while {self._doing}; raise the timeout or reduce the load")

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _end(self) -> None:
        self._over = True
        if self._task is not None:
            self._fired = True
            self._task.cancel()


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request and its progress. ``output_token_ids`` grows as tokens arrive, so that a retry continues after them.
    ``placements`` describe the workers of each attempt and the reason for the choice."""

    request: Request
    deadline: Deadline
    timeline: Timeline = field(default_factory=Timeline)
    status: RequestStatus = RequestStatus.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    placements: list[str] = field(default_factory=list)

    def transition(self, to: RequestStatus) -> None:
        """Change the status to ``to``. `IllegalTransition` if the table forbids it."""
        self.status = check_transition(REQUEST_TRANSITIONS, self.status, to)

    def next_attempt(self) -> Request:
        """Return the request for the next attempt. Its attempt id is unique even if a client uses a request id again,
        so that late outputs of an earlier attempt are not mistaken for outputs of this one."""
        attempt_id = f"{self.request.request_id}#{secrets.token_hex(4)}"
        return self.request.attempt(attempt_id, self.output_token_ids, self.deadline.left_s)

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
    """A token for the client. The last token has a finish reason."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class RoutingResult:
    """The result of a request, complete after its last token.

    ``decode_worker``: empty if there was no hand-off.
    ``kv_bytes_expected``: KV bytes that the hand-off of the last attempt has to move; 0 if there was none, or if the
    client stopped before decode gave a token.
    ``prefill_cached_tokens``: tokens of the prompt that the prefix cache held where it was prefilled.
    """

    mode: Mode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    proof: TransferProof | None = None
    kv_bytes_expected: int = 0
    block_size: int = 0
    attempts: int = 0
    prefill_cached_tokens: int = 0
