"""One request inside the engine: its tokens, its KV and how far it is."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.messages import KVRole, Submit
from engine.scheduling.prefix_cache import PrefixDigests
from pdserve.core.request import ENGINE_TRANSITIONS, EngineStatus, check_transition
from pdserve.core.sampling import FinishReason, SamplingParams


class TokenHistory:
    """Which tokens a request has in its prompt and output: what penalties are taken by.

    It grows token by token, so that no step reads the whole prompt again. All arrays have the type code ``q``.

    ``seen_ids`` are the distinct ids of prompt and outputs; ``output_ids`` those of the outputs alone, and
    ``output_counts`` how often each of them came. In order of their first appearance.
    """

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        """``token_ids`` are known already; those after the first ``num_prompt_tokens`` are outputs."""
        self.seen_ids = array("q", dict.fromkeys(token_ids[:num_prompt_tokens]))
        self.output_ids = array("q")
        self.output_counts = array("q")
        self._seen = set(self.seen_ids)
        self._places: dict[int, int] = {}
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take an output token in."""
        if token_id not in self._seen:
            self._seen.add(token_id)
            self.seen_ids.append(token_id)
        place = self._places.setdefault(token_id, len(self.output_ids))
        if place == len(self.output_ids):
            self.output_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, how far their KV is computed, and its blocks. Compared by identity.

    ``arrival`` is its rank among all requests this engine ever took; it is fixed, and the lower the more senior.
    ``token_ids`` are prompt and outputs; the KV of the first ``num_computed_tokens`` is in the pool, in ``block_ids``.
    ``stop_token_ids`` include the model's end-of-sequence ids unless the request ignores them.
    ``first_scheduled_s`` begins the first step that computed anything for it here.
    ``history`` is kept for requests with penalties alone.
    Of its blocks the first ``num_published_blocks`` can be found by others; ``prefix`` names them.
    ``num_cached_tokens`` of its tokens were in the cache at its first admission.
    ``num_remote_tokens`` of its first tokens await their KV from elsewhere. While ``pinned``, something outside reads
    its blocks, and they must stay. ``kv_role`` is for the connector alone. ``draft_token_ids`` are guesses of what
    comes after ``token_ids``.
    """

    attempt_id: str
    kv_role: KVRole
    arrival: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    status: EngineStatus = EngineStatus.WAITING
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    first_scheduled_s: float | None = None
    in_step: bool = False
    num_remote_tokens: int = 0
    pinned: bool = False
    draft_token_ids: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    prefix: PrefixDigests | None = None
    num_published_blocks: int = 0
    num_cached_tokens: int = 0

    @classmethod
    def from_submit(cls, submit: Submit, arrival: int, eos_token_ids: Collection[int]) -> Sequence:
        """A WAITING request as its `Submit` describes it."""
        request, sampling = submit.request, submit.request.sampling
        token_ids, stop_token_ids = list(request.token_ids), frozenset(sampling.stop_token_ids)
        return cls(
            attempt_id=request.attempt_id,
            kv_role=submit.kv_role,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=submit.max_tokens,
            params=sampling,
            stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids.union(eos_token_ids),
            history=TokenHistory(token_ids, len(request.prompt_token_ids)) if sampling.penalises else None,
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known whose KV is not in the pool: 1 while it decodes, more while it prefills."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def computes_prompt(self) -> bool:
        """Whether KV of its prompt is still missing. Blocks for all tokens known then were taken at its admission."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, here or (the first of a request whose KV came from elsewhere) by prefill."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens still wanted: ``max_tokens`` less those there are."""
        return self.max_tokens - self.num_output_tokens

    def transition(self, to: EngineStatus) -> None:
        """Move to ``to``; `pdserve.core.request.IllegalTransition` if the table forbids it."""
        self.status = check_transition(ENGINE_TRANSITIONS, self.status, to)

    def append(self, token_id: int) -> FinishReason | None:
        """Add an output token, and tell why it is the last one (None: it is not)."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining_tokens <= 0 else None
