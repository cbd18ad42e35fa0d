"""A request inside the engine: its tokens, blocks and progress."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from contract.engine import KVRole, Submit
from engine.scheduling.speculation import Speculation
from engine.scheduling.structures import Matcher
from pdserve.core.prefix_digests import PrefixDigests
from pdserve.core.request import ENGINE_TRANSITIONS, EngineStatus, Request, check_transition
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs


class TokenHistory:
    """The distinct tokens of a request, from which penalties are computed. It grows token by token, so that no step
    reads the whole prompt again.

    ``seen_ids`` are the distinct ids of prompt and outputs, ``output_ids`` those of the outputs, and ``output_counts``
    how often each of these occurred. All are arrays of type code ``q``, in order of first appearance. ``matcher`` has
    followed the outputs if these have to match a structure. A request without penalties has a history for its
    ``matcher`` alone, which starts without tokens.
    """

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int, matcher: Matcher | None = None) -> None:
        """Start with ``token_ids``, of which the first ``num_prompt_tokens`` are the prompt. ``matcher`` has followed
        the others."""
        self.matcher: Matcher | None = None
        self.seen_ids = array("q", dict.fromkeys(token_ids[:num_prompt_tokens]))
        self.output_ids = array("q")
        self.output_counts = array("q")
        self._seen = set(self.seen_ids)
        self._places: dict[int, int] = {}
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)
        self.matcher = matcher

    def append(self, token_id: int) -> None:
        """Add an output token."""
        if self.matcher is not None:
            self.matcher.append(token_id)
        if token_id not in self._seen:
            self._seen.add(token_id)
            self.seen_ids.append(token_id)
        place = self._places.setdefault(token_id, len(self.output_ids))
        if place == len(self.output_ids):
            self.output_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += 1

    def after(self, token_id: int) -> TokenHistory:
        """A copy, with ``token_id`` added."""
        copy = TokenHistory((), 0, None if self.matcher is None else self.matcher.after(()))
        copy.seen_ids, copy.output_ids, copy.output_counts = self.seen_ids[:], self.output_ids[:], self.output_counts[:]
        copy._seen, copy._places = set(self._seen), dict(self._places)
        copy.append(token_id)
        return copy


class PromptLogprobs:
    """Log-probabilities of the tokens of ``token_ids``, a prompt, after the first, each with ``num_top`` likeliest
    ones. Steps that compute the prompt add them to ``values``, in order."""

    def __init__(self, token_ids: Seq[int], num_top: int) -> None:
        self.num_top = num_top
        self.values: list[TokenLogprobs] = []
        self._token_ids = token_ids

    def missing(self, start: int, end: int) -> tuple[range, Seq[int]]:
        """Of the positions ``start`` to ``end`` - 1, those that precede a token without logprobs, and these tokens."""
        positions = range(max(start, len(self.values)), min(end, len(self._token_ids) - 1))
        return positions, self._token_ids[positions.start + 1 : positions.stop + 1]


def _history(request: Request, matcher: Matcher | None) -> TokenHistory | None:
    if request.sampling.penalises:
        return TokenHistory(request.token_ids, len(request.prompt_token_ids), matcher)
    # Nothing reads the tokens without penalties, and each guess of a draft would copy them.
    return None if matcher is None else TokenHistory((), 0, matcher)


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request. Compared by identity."""

    attempt_id: str
    kv_role: KVRole  # of its `Submit`; only the KV connector reads it, and ``num_prefix_tokens``
    arrival: int  # its number among all requests of this engine
    queued_s: float  # when it came, or was preempted the last time
    priority: int  # lower ones come first
    ahead: bool  # it comes before others of its priority
    token_ids: list[int]  # prompt and outputs; the KV of the first ``num_computed_tokens`` is in ``block_ids``
    num_prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int]  # include the model's end-of-sequence ids, unless the request ignores them
    status: EngineStatus = EngineStatus.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None  # start of the first step that computed anything for it here
    num_running_steps: int = 0  # steps in flight that it is part of
    num_running_tokens: int = 0  # which these steps compute
    num_pending_tokens: int = 0  # which these steps sample; they come after ``token_ids``
    num_prefix_tokens: int = 0
    num_remote_tokens: int = 0  # how many of its first tokens await their KV from elsewhere
    pinned: bool = False  # something outside the engine reads its blocks, so it keeps them
    history: TokenHistory | None = None  # kept only for requests with penalties or structured outputs
    prompt_logprobs: PromptLogprobs | None = None  # until its first token here, if they are wanted
    # the digests of its blocks, of which the first ``num_published_blocks`` are cached (None: no caching)
    prefix: PrefixDigests | None = None
    num_published_blocks: int = 0
    # its tokens that the prefix cache held at its first admission, or that came from elsewhere
    num_cached_tokens: int = 0
    speculation: Speculation | None = None

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        arrival: int,
        now_s: float,
        eos_token_ids: Collection[int],
        matcher: Matcher | None = None,
    ) -> Sequence:
        """Create a WAITING request from its `Submit`, with the ``matcher`` of its structured outputs."""
        request, sampling = submit.request, submit.request.sampling
        token_ids, stop_token_ids = list(request.token_ids), frozenset(sampling.stop_token_ids)
        return cls(
            attempt_id=request.attempt_id,
            kv_role=submit.kv_role,
            arrival=arrival,
            queued_s=now_s,
            priority=request.priority,
            ahead=request.ahead,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=submit.max_tokens,
            params=sampling,
            stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids.union(eos_token_ids),
            num_prefix_tokens=submit.prefix_tokens,
            history=_history(request, matcher),
            prompt_logprobs=None
            if sampling.prompt_logprobs is None or submit.kv_role is KVRole.RECEIVE
            else PromptLogprobs(request.prompt_token_ids, sampling.prompt_logprobs),
        )

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Its rank among the requests of this engine: the lowest is the first to be computed and the last to lose its
        blocks."""
        return self.priority, not self.ahead, self.arrival

    @property
    def error(self) -> str:
        """Why it cannot go on: its output does not match its structure. Empty while it can."""
        return "" if self.history is None or self.history.matcher is None else self.history.matcher.error

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens whose KV is in the pool when the steps in flight have run."""
        return self.num_computed_tokens + self.num_running_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, including pending ones."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known and pending tokens whose KV no step has computed or computes: 1 while it decodes, more while it
        prefills."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens - self.num_running_tokens

    @property
    def can_go_on(self) -> bool:
        """Whether a step may compute it before the steps in flight are known: not if they sample its last token by
        length or verify its drafts, and not if the next step is to verify some."""
        pending = self.num_pending_tokens
        if not pending:
            return True
        if self.speculation is not None and self.speculation.waits:
            return False
        return self.max_tokens > len(self.token_ids) - self.num_prompt_tokens + pending

    @property
    def computes_prompt(self) -> bool:
        """Whether KV of its prompt is missing. Its blocks for the prompt were allocated at its admission."""
        return self.num_scheduled_tokens < self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, including the token 1 that came with received KV."""
        return len(self.token_ids) - self.num_prompt_tokens

    def transition(self, to: EngineStatus) -> None:
        """Change the status to ``to``. AssertionError if the table forbids it."""
        self.status = check_transition(ENGINE_TRANSITIONS, self.status, to)

    def possible(self, drafts: list[int]) -> list[int]:
        """The first of ``drafts``, as far as its structure lets them come next."""
        if self.history is None or self.history.matcher is None:
            return drafts
        return drafts[: self.history.matcher.num_possible(drafts)]

    def append(self, token_id: int) -> FinishReason | None:
        """Add an output token. Returns the reason if it is the last one, else None."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.num_prompt_tokens + self.max_tokens else None
