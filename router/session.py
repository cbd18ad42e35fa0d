"""A request in the router: its progress and its result."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from pdserve.core.handoff import PrefixFetch, TransferProof
from pdserve.core.request import REQUEST_TRANSITIONS, FailedAttempt, Mode, Request, RequestStatus, check_transition
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.timeline import Timeline
from router.deadline import Deadline


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
    """Where the last attempt of a request runs, and what that has shown; complete after the last token."""

    mode: Mode | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    """Empty if there was no hand-off."""
    block_size: int = 0
    proof: TransferProof | None = None
    kv_bytes_expected: int = 0
    """KV bytes that the hand-off has to move; 0 if there was none, or if the client stopped before decode gave a
    token."""
    prefill_cached_tokens: int = 0
    """Tokens of the prompt that were not computed where it was prefilled, because the prefix cache there held them or
    ``prefix_fetch`` brought them from another worker's."""
    prefix_fetch: PrefixFetch | None = None
    """None: nothing was fetched."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    """Guesses that were verified, and those of them that were right."""
    prefix_bytes_expected: int = 0
    """KV bytes of the tokens that were fetched, by arithmetic."""


@dataclass(slots=True, eq=False)
class Session:
    """The life of a request on the router: what it asks, how far it is, and how it has run. It is driven by
    `router.router.Router.generate`."""

    request: Request
    deadline: Deadline
    timeline: Timeline = field(default_factory=Timeline)
    status: RequestStatus = RequestStatus.QUEUED
    output_token_ids: list[int] = field(default_factory=list)
    """Grows as tokens arrive, so that a retry continues after them."""
    attempts: int = 0
    placements: list[str] = field(default_factory=list)
    """The workers of each of the last attempts, and the reason for the choice."""
    failures: list[FailedAttempt] = field(default_factory=list)
    """Of the last attempts those that failed and were followed by another."""
    client: str = ""
    """Who takes turns with others in the queue."""
    holder: str = ""
    """Whose share of the queue it takes (empty: the client's)."""
    recomputed_tokens: int = 0
    """Prefilled again because its client left tokens unread."""
    result: RoutingResult = field(default_factory=RoutingResult)
    stopped: bool = False
    """Its client needs no more tokens."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens after the first, if they were asked for; known from the first token on."""

    def __post_init__(self) -> None:
        self.holder = self.holder or self.client

    def transition(self, to: RequestStatus) -> None:
        """Change the status to ``to``. AssertionError if the table forbids it."""
        self.status = check_transition(REQUEST_TRANSITIONS, self.status, to)

    def next_attempt(self, chance: random.Random) -> Request:
        """Return the request for the next attempt. Its attempt id is unique even if a client uses a request id again,
        so that late outputs of an earlier attempt are not mistaken for outputs of this one."""
        attempt_id = f"{self.request.request_id}#{chance.randbytes(4).hex()}"
        request = self.request.attempt(attempt_id, self.output_token_ids, self.deadline.left_s)
        if self.prompt_logprobs:  # they are known, so the prefix cache may be used
            sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
            request = msgspec.structs.replace(request, sampling=sampling)
        return request

    def end(self, status: RequestStatus) -> None:
        """`transition` to a last status, unless it has one."""
        if status in REQUEST_TRANSITIONS[self.status]:
            self.transition(status)

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

    @property
    def min_output_tokens(self) -> int:
        """The fewest tokens that it still generates."""
        sampling = self.request.sampling
        ends_early = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids
        return 1 if ends_early else self.tokens_left
