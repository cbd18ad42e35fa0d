"""What the router keeps of a request while it is here, whatever attempts it takes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from pdserve.core.request import REQUEST_TRANSITIONS, Request, RequestStatus, check_transition
from pdserve.core.timeline import Timeline
from router.deadline import Deadline


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
