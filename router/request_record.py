"""A request while the router has it: its deadline, the record of its attempts, and what the router gives back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from pdserve.core.clock import Clock
from pdserve.core.errors import DeadlineExceeded
from pdserve.core.handoff import TransferProof
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.request import REQUEST_TRANSITIONS, Mode, Request, RequestStatus, check_transition
from pdserve.core.sampling import FinishReason
from pdserve.core.timeline import Timeline

T = TypeVar("T")


class Deadline:
    """``deadline_s`` is a time on ``clock``; what is left of it when this is made runs on the event loop's clock."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + deadline_s - clock.now()

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._until - self._loop.time())

    async def bound(self, awaitable: Awaitable[T], doing: str) -> T:
        """The result of ``awaitable``, or `DeadlineExceeded` that says what the request was ``doing``."""
        try:
            async with asyncio.timeout_at(self._until):
                return await awaitable
        except TimeoutError:
            raise DeadlineExceeded(f"deadline: it passed while {doing}; raise the timeout or reduce the load") from None

    async def sleep(self, seconds: float, doing: str) -> None:
        """Sleep, but not past the deadline."""
        if seconds > 0:
            await self.bound(asyncio.sleep(seconds), doing)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request, its bounds, and what has become of it. ``output_token_ids`` grows as tokens arrive, so that a retry
    can go on from prompt and tokens so far. ``placements`` say where each attempt went, and why."""

    request: Request
    deadline: Deadline
    timeline: Timeline = field(default_factory=Timeline)
    status: RequestStatus = RequestStatus.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    attempts: int = 0
    placements: list[str] = field(default_factory=list)

    def transition(self, to: RequestStatus) -> None:
        """Move to ``to``; `IllegalTransition` if the table forbids it."""
        self.status = check_transition(REQUEST_TRANSITIONS, self.status, to)

    def next_attempt(self) -> Request:
        """The request as workers get it now. No two attempts have the same name on a worker, even if a client uses an
        id again: what a worker still says of an earlier one cannot be taken for this one's."""
        attempt_id = f"{self.request.request_id}#{secrets.token_hex(4)}"
        return self.request.attempt(attempt_id, self.output_token_ids, self.deadline.left_s)

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def tokens_left(self) -> int:
        """Tokens still wanted."""
        return self.request.sampling.max_tokens - len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class RoutedToken:
    """A token on its way to the client; the last one says why it is the last."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class RoutingResult:
    """What became of a request, complete once its tokens are. ``decode_worker`` is empty if nothing was decoded
    elsewhere; ``kv_bytes_expected`` is 0 then, and when the client had enough before decode gave anything; else it is
    what the last attempt's hand-off must weigh. ``prefill_cached_tokens`` of the prompt were cached where it ran."""

    mode: Mode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    proof: TransferProof | None = None
    kv_bytes_expected: int = 0
    block_size: int = 0
    attempts: int = 0
    prefill_cached_tokens: int = 0
