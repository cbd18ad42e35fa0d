"""Decides how many tokens of which requests the next step computes, and gives them blocks.

A step is ``{request: num_tokens}`` under one token budget. Prefill and decode are not distinguished: a request has
tokens without KV, one while it decodes and many while it prefills, and a step computes some or all of them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from contract.engine import Finished, Load, Rejected, Step, Submit, TokenOut
from engine.scheduling.batch import PENDING, SampledToken, ScheduledSeq
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import MAX_DRAFTS, MOST_MISSING, DraftContext, Drafter, DraftPolicy, Speculation
from engine.scheduling.structures import Matcher
from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, InvalidRequest, PdserveError, to_wire
from pdserve.core.prefix_digests import PrefixDigests
from pdserve.core.request import AGED_S, EngineStatus
from pdserve.core.sampling import FinishReason

SchedulerEvent = Rejected | Finished

MAX_IN_FLIGHT = 2
"""Steps that may be in flight at once. A `PENDING` token is that of the step before, so there cannot be more."""

OVERTAKEN_S = 1.0
"""Requests whose client has few (`Request.ahead`) overtake others of their priority that came less than this before."""

_LEAST_OUTPUTS = 2
"""A request has so many tokens before a draft model guesses its next ones, so that it does not delay its token 2."""

WATERMARK_DIVISOR = 100  # 1 % of the pool is kept free for running requests to grow


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one engine. All numbers are at least 1."""

    # ``max_num_batched_tokens``, ``max_num_seqs``: tokens and requests of a step
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int  # tokens of prompt and output of a request
    # ``block_size``, ``num_blocks``: tokens per block, and blocks in the pool
    block_size: int
    num_blocks: int
    eos_token_ids: Collection[int] = ()  # end every request that does not ignore them
    prefix_caching: bool = True  # requests of the same salt share the blocks of equal beginnings
    chunk_tokens: int | None = None  # tokens of one prompt in a step (None: limited by the step's budget only)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step to run: its parts, the time at which it was scheduled (seconds of the injected clock), and the requests
    that were preempted for it. If ``seqs`` is empty, nothing can run and no `Scheduler.update` follows."""

    seqs: list[ScheduledSeq]
    started_s: float
    preempted: list[str]
    drafted_s: float | None = None  # when the drafter was done, if its guesses cost anything


class TokenBudget:
    """The tokens of one step, given to one request after the other.

    ``num_tokens`` is the budget of the step. One token for each of ``num_decodes`` decoding requests is kept back from
    prompts. ``chunk_tokens`` is the most that one prompt gets (None: the budget is the only limit).
    """

    def __init__(self, num_tokens: int, num_decodes: int, chunk_tokens: int | None) -> None:
        self._left = num_tokens
        self._spare = num_tokens - num_decodes
        self._chunk_tokens = num_tokens if chunk_tokens is None else chunk_tokens

    @property
    def left(self) -> int:
        """Tokens that nobody has been given."""
        return self._left

    def offer(self, wanted: int, *, first: bool) -> int:
        """How many of ``wanted`` tokens (at least 1) a running request gets. The ``first`` request of a step always
        gets one."""
        if wanted == 1:
            return min(1, self._left)
        return max(0, min(wanted, self._chunk_tokens, max(self._spare, int(first)), self._left))

    def offer_new(self, wanted: int) -> int:
        """How many of ``wanted`` tokens a request gets that is admitted in this step, after all running ones."""
        return min(wanted, self._chunk_tokens, self._left)

    def spend(self, num_tokens: int, wanted: int) -> None:
        """Take ``num_tokens`` tokens for a request that wanted ``wanted``. A decode's token was kept back already."""
        self._left -= num_tokens
        if wanted > 1:
            self._spare -= num_tokens


class Scheduler:
    """Continuous batching with chunked prefill over a paged pool with a prefix cache.

    `engine.core.EngineCore` passes commands to it and calls `schedule` and `update` for each step, which is in flight
    between the two. Commands may come in between: a request that ends keeps its blocks until the `update` of the last
    step in flight that computes it, because that step may still write to them.

    **Running ahead.** One step may be scheduled while another is in flight. The tokens that the first one samples are
    pending then: the second one computes them, as `PENDING` parts, before they are known. What is certain is decided
    right away: a request whose pending token is its last by length gets no further part. A request that turns out to
    have ended by a stop id has a part too many, whose token `update` drops. Nothing is preempted while a step is in
    flight, so that only requests are preempted whose tokens are known and to whose blocks nothing writes: `has_work` is
    False then if blocks are short.

    **Order.** Requests rank by priority (lower values first), within a priority those that are ``ahead`` come first,
    then by arrival. One that is ahead is computed in place of the lowest of a full step. A step takes running
    requests first, in that order: each decoding request gets a token, and chunks of prompts get the rest of the budget.
    The first request of a step always gets a token. Preempted and waiting requests follow, in the same order: a request
    that cannot be admitted blocks all requests behind it. Admission preempts nothing. It allocates the blocks of all
    known tokens, so only decoding requests grow. While other requests may grow, it leaves a small watermark of blocks
    free.

    **Prefix cache.** Admission shares the cached blocks that hold the beginning of the request's tokens. At least one
    token remains to be computed, from which the next is sampled. A full block is cached after the step that
    wrote it, or by `kv_ready`. It is never written again: a request writes only at positions without KV, which are in
    blocks of its own.

    **Speculation.** A request that decodes may get drafts in a step (`engine.scheduling.speculation`): from what the
    budget leaves, into blocks that it has or that are free beyond the watermark. They count for nothing until `update`:
    their KV is computed once they are accepted, and is else written over by the next step. While guesses are right, the
    request is not computed ahead, because what comes next is guessed from known tokens. A draft model computes while no
    step is in flight (`will_draft`). Requests with structured outputs have drafts only if
    they insist, since the masks after wrong ones count for the budget of the structure, too; a draft that the structure
    forbids is none.

    **KV transfer** is up to a connector (`engine.scheduling.kv_connector`). The scheduler knows two facts about a
    request: how many of its first tokens await their KV from elsewhere, and whether its blocks are pinned because
    something outside the engine reads them. A request that awaits KV gets its blocks as soon as its turn comes and they
    are free, between steps as well, and runs after `kv_ready`. Pinned blocks stay until `release` or an abort.

    **Progress.** Every request finishes, for three reasons.
    (1) The highest running request advances. If it needs a block and none is free, lower requests are preempted, the
    lowest first, until a block is free. It waits only if preemption would free no block: then every other block belongs
    to a request that is pinned or awaits KV, or to `pin_prefix`. A pinned request never grows, so it advances if it
    runs. If it has finished, or awaits KV, then `kv_ready`, `release` or `abort` follows within the connector's lease,
    and so it does after `pin_prefix`.
    (2) The highest request finishes after at most prompt + ``max_tokens`` such steps, because it is never preempted.
    Then the next request is the highest. Only requests that are submitted with a lower ``priority`` within `AGED_S`
    after it, or ``ahead`` within `OVERTAKEN_S`, can come before it: later ones do not overtake it.
    (3) While a request waits or is preempted, no lower request is admitted. So finitely many requests run before it,
    and it fits when they are done: `submit` refuses requests that exceed an empty pool, and an idle pool has no
    watermark. A step that preempts admits nothing, so that the blocks go to the request that needs them.
    Sharing of blocks does not affect this: a block without an owner counts as free whether it is cached or not, and a
    preemption that frees no block is not made.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        connector: KVConnector | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Create an idle scheduler. Without a ``connector`` it transfers no layers early, and without a ``drafter``
        steps verify no guesses."""
        self.config = config
        self._drafter = drafter
        self._draft_policy = DraftPolicy()
        self.connector = connector or KVConnector(clock)
        self.blocks = BlockManager(config.num_blocks, config.block_size, self.connector.evicted)
        self._clock = clock
        self._token_budget = config.max_num_batched_tokens
        self.max_step_tokens = config.max_num_batched_tokens
        """A lower limit than the budget, for a while, because a larger step has run out of memory."""
        self._watermark = max(1, config.num_blocks // WATERMARK_DIVISOR)
        self._seqs: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()  # highest rank first, as the next two
        self._preempted: list[Sequence] = []
        self._running: list[Sequence] = []
        self._awaiting_kv: dict[str, Sequence] = {}
        self._in_flight: deque[tuple[SchedulerOutput, list[Sequence]]] = deque()  # steps and their requests
        self._updated_s = -math.inf
        self._events: list[SchedulerEvent] = []
        self._arrivals = 0
        self._preemptions = 0
        self._draft_tokens = 0
        self._accepted_draft_tokens = 0
        self._looked_up_tokens = 0
        self._cached_tokens = 0

    # --- commands ----------------------------------------------------------------------------------------------------

    def set_token_budget(self, num_tokens: int) -> None:
        """Set the tokens of a step, from the next one on: at least 1, and at most those of the configuration, which the
        memory of the device was divided for."""
        self._token_budget = max(1, min(num_tokens, self.config.max_num_batched_tokens))

    def submit(self, submit: Submit, matcher: Matcher | None = None) -> None:
        """Queue a request, or answer with a `Rejected` event: `CapacityExceeded` if it can never fit, `InvalidRequest`
        for an empty prompt, a ``max_tokens`` below 1, or an id in use. ``matcher`` is that of its structured
        outputs."""
        error = self._objection(submit)
        if error is not None:
            self.reject(submit.attempt_id, error)
            return
        seq = Sequence.from_submit(submit, self._arrivals, self._clock.now(), self.config.eos_token_ids, matcher)
        if self.config.prefix_caching and seq.prompt_logprobs is None:  # else all of the prompt is computed
            seq.prefix = PrefixDigests(submit.request.salt, self.config.block_size)
        wanted = submit.request.sampling.speculation
        if wanted is None and matcher is not None:  # masks after guesses use up a part of the structure's budget
            wanted = False
        if self._drafter is not None and wanted is not False and seq.max_tokens > 1:
            seq.speculation = self._draft_policy.start(bool(wanted), self._drafter.free)
        seq.num_remote_tokens = self.connector.remote_tokens(seq, len(self._cached(seq)))
        self._arrivals += 1
        self._seqs[seq.attempt_id] = seq
        self._age_others(seq)
        if self._waiting and seq.rank < self._waiting[-1].rank:
            insort(self._waiting, seq, key=_rank)
        else:
            self._waiting.append(seq)
        self._reserve()

    def reject(self, attempt_id: str, error: PdserveError) -> None:
        """Answer with a `Rejected` event."""
        self._events.append(Rejected(attempt_id, *to_wire(error)))

    def kv_ready(self, attempt_id: str, first_token_id: int | None = None, num_tokens: int | None = None) -> None:
        """Let a request run, because the KV of its remote tokens is in its blocks and verified, or only that of the
        first ``num_tokens``: the others are computed.

        ``first_token_id`` is its next token, if that came with the KV. If it is also the last one (by length or stop
        id), the request is finished and a `Finished` event follows. Ignored unless the request awaits KV.
        """
        seq = self._awaiting_kv.pop(attempt_id, None)
        if seq is None:
            return
        arrived = seq.num_remote_tokens if num_tokens is None else num_tokens
        found = max(0, arrived - seq.num_computed_tokens)
        seq.num_computed_tokens += found
        seq.num_remote_tokens = 0
        if num_tokens is not None:
            seq.num_cached_tokens += found
            self._cached_tokens += found
        self._publish(seq)
        if seq.pinned and found:
            self.connector.computed(seq)
        seq.transition(EngineStatus.RUNNING)
        reason = None if first_token_id is None else seq.append(first_token_id)
        if reason is None or seq.error:
            self._join(seq)
            self._reject_mismatch(seq)
        else:
            self._events.append(Finished(seq.attempt_id, reason.value))
            self._finish(seq)
            self._reserve()

    def pin_prefix(self, attempt_id: str, salt: str, token_ids: Seq[int]) -> None:
        """Keep the cached blocks that hold the beginning of ``token_ids`` until `release` or `abort`, because something
        outside the engine is to read them. The connector is told which these are."""
        found: list[int] = []
        if self.config.prefix_caching:
            size = self.config.block_size
            found = self.blocks.find(PrefixDigests(salt, size).first(len(token_ids) // size, token_ids))
            self.blocks.allocate(attempt_id, len(found) * size, found)  # no block is missing, so it never fails
        self.connector.prefix_pinned(attempt_id, found)

    def release(self, attempt_id: str) -> None:
        """Unpin the blocks of a request or of `pin_prefix`, because nothing outside the engine reads them any more.
        Those of a request are freed when it has finished. Ignored for unknown ids."""
        seq = self._seqs.get(attempt_id)
        if seq is None:
            self._unpin_prefix(attempt_id)
            return
        seq.pinned = False
        if seq.status is EngineStatus.FINISHED:
            self._forget(seq)
            self._reserve()

    def abort(self, attempt_id: str) -> None:
        """Drop a request in any state, or unpin the blocks of `pin_prefix`. Unknown ids are ignored. Blocks of a
        request are freed at once, or after the last step in flight that computes it."""
        seq = self._seqs.get(attempt_id)
        if seq is None:
            self._unpin_prefix(attempt_id)
            return
        for line in (self._waiting, self._running, self._preempted):
            if seq in line:
                line.remove(seq)
        self._awaiting_kv.pop(attempt_id, None)
        if seq.status is not EngineStatus.FINISHED:
            seq.transition(EngineStatus.FINISHED)
            self.connector.release(seq)
        self._forget(seq)
        self._reserve()

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a step that computes anything. While a step is in flight, one that might
        preempt has to wait."""
        batch = self._ready()
        free = self.blocks.free_blocks
        if self._in_flight and len(batch) > free and self._missing_blocks(batch) > free:  # each lacks one at most
            return False
        if batch and self._can_run(batch):
            return True
        return self._admissible(len(self._batch())) is not None

    @property
    def will_draft(self) -> bool:
        """Whether a drafter whose guesses cost time may be asked for some of the next step, if none is in flight."""
        if self._drafter is None or self._drafter.free:
            return False
        return any(
            seq.speculation is not None and seq.speculation.waits
            for seq in self._batch()
            if _decodes_known(seq) and seq.num_output_tokens >= _LEAST_OUTPUTS
        )

    def schedule(self) -> SchedulerOutput:
        """Return the next step. AssertionError if `MAX_IN_FLIGHT` steps are in flight. With one in flight, call it only
        if `has_work`."""
        started_s = self._begin_step()
        max_num_seqs = self.config.max_num_seqs
        while (head := self._displacing()) is not None:
            self._start(head)
        parts: list[tuple[Sequence, int]] = []  # requests, and how many of their tokens
        preempted: list[str] = []
        batch = self._ready()
        every = [seq.num_uncomputed_tokens for seq in batch]
        budget = self._budget(every)
        block_size = self.config.block_size
        for seq, wanted in zip(batch, every, strict=True):
            if len(parts) == max_num_seqs:
                break  # received KV is always accepted, so more requests may run than fit into a step
            if seq.status is not EngineStatus.RUNNING:
                continue  # preempted in this loop
            num_tokens = budget.offer(wanted, first=not parts)
            if num_tokens < wanted:
                num_tokens = self._cut(seq, num_tokens)
            end = seq.num_computed_tokens + seq.num_running_tokens + num_tokens
            fits = end <= len(seq.block_ids) * block_size
            if num_tokens and (fits or self._grow(seq, end, preempted)):
                parts.append((seq, num_tokens))
                budget.spend(num_tokens, wanted)
        # A preempted request must not get back the blocks that were just freed.
        while not preempted:
            self._reserve()
            head = self._admissible(len(self._batch()))
            if head is None:
                break
            wanted = self._to_compute(head)
            num_tokens = budget.offer_new(wanted)
            if num_tokens < wanted:
                num_tokens = self._cut(head, num_tokens)
            if not num_tokens:
                break
            self._start(head)
            parts.append((head, num_tokens))
            budget.spend(num_tokens, wanted)
        drafts: dict[Sequence, list[int]] = {}
        drafted_s: float | None = None
        drafter = self._drafter
        if drafter is not None and not preempted and (drafter.free or not self._in_flight):
            drafts, drafted_s = self._draft(drafter, parts, budget.left)
        return self._launch(parts, started_s, preempted, drafts, drafted_s)

    def update(self, output: SchedulerOutput, sampled: Mapping[str, Seq[SampledToken]], sampled_s: float) -> Step:
        """Apply the results of the oldest step in flight and return its tokens. AssertionError if it is not ``output``.

        ``sampled`` holds the next token of every part with ``sample`` (KeyError if one is missing), and those after
        each of its drafts. ``sampled_s`` is the time at which the tokens were known, in seconds of the clock. Requests
        that have ended meanwhile are left out.

        A step that was scheduled while another one was in flight counts as started when that one's tokens were known.
        """
        oldest, seqs = self._in_flight.popleft()
        if oldest is not output:
            raise AssertionError("update() was called for another step than the oldest in flight")
        started_s = max(output.started_s, self._updated_s)
        self._updated_s = sampled_s
        step = Step(sampled_s, started_s, drafted_s=output.drafted_s)
        any_ended, block_size = False, self.config.block_size
        draft_cost = (
            None
            if self._drafter is None
            else self._learn_cost(output.seqs, sampled_s - (output.drafted_s or started_s))
        )
        for part, seq in zip(output.seqs, seqs, strict=True):
            num_tokens = len(part.token_ids) - part.num_drafts
            any_ended |= self._take_back(part, seq)
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = started_s
            if seq.status is not EngineStatus.RUNNING:  # it has ended meanwhile
                continue
            seq.num_computed_tokens += num_tokens
            reason = None
            if part.sample:
                token = sampled[part.attempt_id][0]
                if seq.speculation is not None and not part.num_drafts:
                    self._observe_next(seq, seq.speculation, token.token_id, draft_cost)
                reason = seq.append(token.token_id)
                if seq.history is not None and self._reject_mismatch(seq):
                    any_ended = True
                    continue
                first = TokenOut(
                    part.attempt_id,
                    token.token_id,
                    "" if reason is None else reason.value,
                    seq.first_scheduled_s,
                    token.logprobs,
                    seq.num_cached_tokens if len(seq.token_ids) == seq.num_prompt_tokens + 1 else 0,
                    () if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs.values),
                )
                seq.prompt_logprobs = None
                step.tokens.append(first)
                if part.num_drafts:
                    reason = self._accept(seq, part, reason, sampled[part.attempt_id][1:], step, draft_cost)
                    if seq.history is not None and self._reject_mismatch(seq):
                        any_ended = True
                        continue
            if seq.num_computed_tokens >= (seq.num_published_blocks + 1) * block_size:
                self._publish(seq)
            if seq.pinned:
                self.connector.computed(seq)
            if reason is not None:
                any_ended = True
                self._finish(seq)
        if any_ended:
            self._running = [seq for seq in self._running if seq.status is EngineStatus.RUNNING]
            self._reserve()
        return step

    def cancel(self, output: SchedulerOutput, error: PdserveError | None = None) -> None:
        """Undo the newest step in flight, of which nothing counts. Its requests go on in other steps, unless an
        ``error`` ends them. AssertionError if the newest step is not ``output``."""
        newest, seqs = self._in_flight.pop()
        if newest is not output:
            raise AssertionError("cancel() was called for another step than the newest in flight")
        ended = [self._take_back(part, seq) for part, seq in zip(output.seqs, seqs, strict=True)]
        if error is not None:
            for seq in seqs:
                if seq.status is EngineStatus.RUNNING:
                    self.reject(seq.attempt_id, error)
                    self.abort(seq.attempt_id)
        if any(ended):
            self._reserve()

    # --- reports -----------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """Return the present load. Requests that await KV count as waiting; finished requests whose blocks are pinned
        count neither as waiting nor as running."""
        running = len(self._batch())
        waiting = len(self._waiting) + len(self._preempted) + len(self._awaiting_kv) + len(self._running) - running
        return Load(
            self.blocks.free_blocks,
            running,
            waiting,
            self._preemptions,
            self._looked_up_tokens,
            self._cached_tokens,
            self.blocks.cached_blocks,
            self.connector.num_stored_blocks,
            self._is_stalled(),
            self._draft_tokens,
            self._accepted_draft_tokens,
        )

    def _is_stalled(self) -> bool:
        """Whether requests lack blocks that only hand-offs can free."""
        return not self._in_flight and (bool(self._running) or self._head() is not None) and not self.has_work

    def take_events(self) -> list[SchedulerEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- internals ---------------------------------------------------------------------------------------------------

    def _objection(self, submit: Submit) -> PdserveError | None:
        config = self.config
        prompt_tokens = submit.request.num_tokens
        total_tokens = prompt_tokens + submit.max_tokens
        if submit.attempt_id in self._seqs:
            return InvalidRequest(f"attempt_id: {submit.attempt_id!r} is in use in this engine")
        if not submit.request.prompt_token_ids:
            return InvalidRequest("prompt_token_ids: the prompt is empty; it must have at least one token")
        if submit.request.sampling.speculation and self._drafter is None:
            return InvalidRequest("speculation: this service has none (engine.speculation is off); leave it out")
        if submit.max_tokens < 1:
            return InvalidRequest(f"max_tokens: {submit.max_tokens} is below 1; it must be at least 1")
        if not 0 <= submit.prefix_tokens < prompt_tokens or submit.prefix_tokens % config.block_size:
            return InvalidRequest(
                f"prefix_tokens: {submit.prefix_tokens} is not a number of whole blocks of {config.block_size} tokens "
                f"below {prompt_tokens}, the tokens of the prompt"
            )
        wanted = f"{prompt_tokens} prompt tokens and up to {submit.max_tokens} new ones"
        if total_tokens > config.max_model_len:
            return CapacityExceeded(f"{wanted} exceed max_model_len {config.max_model_len}; shorten one of them")
        need = self.blocks.blocks_for(total_tokens - 1)  # the last token's KV is never computed
        if need > config.num_blocks:
            return CapacityExceeded(
                f"{wanted} need {need} KV blocks of {config.block_size} tokens, the pool has {config.num_blocks}; "
                "shorten one of them or give the engine more KV memory"
            )
        return None

    def _age_others(self, new: Sequence) -> None:
        """Give requests that have waited for `AGED_S` the priority of a ``new`` one if theirs is later, and those that
        have waited for `OVERTAKEN_S` the same place within it, so that it does not overtake them."""
        now_s = self._clock.now()
        prefilling = [seq for seq in self._running if seq.num_output_tokens == 0]
        others = (*self._waiting, *self._preempted, *prefilling)
        aged = [seq for seq in others if seq.priority > new.priority and seq.queued_s <= now_s - AGED_S]
        for seq in aged:
            seq.priority = new.priority
        if new.ahead:
            overtaken = [
                seq
                for seq in others
                if seq.priority == new.priority and not seq.ahead and seq.queued_s <= now_s - OVERTAKEN_S
            ]
            for seq in overtaken:
                seq.ahead = True
            aged += overtaken
        if aged:
            self._waiting = deque(sorted(self._waiting, key=_rank))
            self._preempted.sort(key=_rank)
            self._running.sort(key=_rank)

    def _head(self) -> Sequence | None:
        if not self._preempted:
            return self._waiting[0] if self._waiting else None
        if self._waiting and self._waiting[0].rank < self._preempted[0].rank:
            return self._waiting[0]
        return self._preempted[0]

    def _batch(self) -> list[Sequence]:
        """The running requests that the next step may compute, highest rank first."""
        return self._running

    def _ready(self) -> list[Sequence]:
        """Those of the batch of which it is known that there is something to compute."""
        return [seq for seq in self._batch() if seq.can_go_on] if self._in_flight else list(self._batch())

    def _missing_blocks(self, batch: list[Sequence]) -> int:
        """How many blocks ``batch`` lacks for its known and pending tokens."""
        blocks_for = self.blocks.blocks_for
        return sum(max(0, blocks_for(seq.num_tokens) - len(seq.block_ids)) for seq in batch)

    def _join(self, seq: Sequence) -> None:
        """Add a RUNNING request to the running ones."""
        insort(self._running, seq, key=_rank)

    def _cut(self, seq: Sequence, num_tokens: int) -> int:
        """How many tokens of ``seq`` a step computes if it has only ``num_tokens`` for it, fewer than ``seq`` wants."""
        return num_tokens

    def _can_run(self, batch: list[Sequence]) -> bool:
        """Whether any request of ``batch`` needs no block for its next token, or can get one."""
        if self.blocks.free_blocks:
            return True
        size = self.config.block_size
        if any(seq.num_scheduled_tokens < len(seq.block_ids) * size for seq in batch):
            return True
        # The highest request may preempt the most others. If that frees no block, no other preemption does.
        return self.blocks.owned_only_by([seq.arrival for seq in self._running[1:] if not seq.pinned])

    def _cached(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the beginning of its tokens and that it can share."""
        if seq.prefix is None:
            return []
        usable = max(len(seq.token_ids) - 1, seq.num_remote_tokens)  # the last is computed if it does not come
        return self.blocks.find(seq.prefix.first(usable // self.config.block_size, seq.token_ids))

    def _fits(self, seq: Sequence) -> bool:
        kept = self._watermark if self._running or self._awaiting_kv else 0
        return self.blocks.cost(len(seq.token_ids), self._cached(seq)) + kept <= self.blocks.free_blocks

    def _admissible(self, num_running: int) -> Sequence | None:
        """The first in line, if it can start to compute now beside ``num_running`` others."""
        head = self._head()
        if head is None or head.num_remote_tokens or num_running >= self.config.max_num_seqs:
            return None
        return head if self._fits(head) else None

    def _displacing(self) -> Sequence | None:
        """The first in line, if it is to be computed in place of the lowest of a full step, which then waits with its
        blocks."""
        head, last = self._head(), self.config.max_num_seqs - 1
        if head is None or not head.ahead or head.num_remote_tokens or len(self._running) <= last:
            return None
        return head if head.rank < self._running[last].rank and self._fits(head) else None

    def _start(self, head: Sequence) -> None:
        """Admit the first in line, which must be `_admissible` or `_displacing`, and let it run."""
        self._admit(head)
        head.transition(EngineStatus.RUNNING)
        self._join(head)

    def _reserve(self) -> None:
        """Admit the requests at the head of the line that await KV. Call it when the head or the free blocks have
        changed."""
        while (head := self._head()) is not None and head.num_remote_tokens and self._fits(head):
            self._admit(head)
            head.transition(EngineStatus.WAITING_FOR_KV)
            self._awaiting_kv[head.attempt_id] = head

    def _admit(self, head: Sequence) -> None:
        """Remove the first in line from the line, and give it the blocks of all its tokens."""
        cached = self._cached(head)
        if not self.blocks.allocate(head.arrival, len(head.token_ids), cached):
            raise AssertionError(f"{head.attempt_id} was admitted, but does not fit")
        head.block_ids = self.blocks.blocks(head.arrival)
        head.num_published_blocks = len(cached)
        head.num_computed_tokens = len(cached) * self.config.block_size
        if head.status is EngineStatus.PREEMPTED:
            del self._preempted[0]
            return
        self._waiting.popleft()
        if head.prefix is not None:
            self._looked_up_tokens += head.num_prompt_tokens
            self._cached_tokens += head.num_computed_tokens
        head.num_cached_tokens = head.num_computed_tokens
        head.pinned = self.connector.allocate(head, len(cached))

    def _begin_step(self) -> float:
        """Return the time of a step. AssertionError if as many steps as allowed are in flight."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise AssertionError(f"schedule() was called while {MAX_IN_FLIGHT} steps are in flight")
        return self._clock.now()

    def _budget(self, wanted: list[int]) -> TokenBudget:
        """That of a step whose running requests want so many tokens."""
        num_decodes = wanted[: self.config.max_num_seqs].count(1)
        return TokenBudget(min(self._token_budget, self.max_step_tokens), num_decodes, self.config.chunk_tokens)

    def _to_compute(self, head: Sequence) -> int:
        return len(head.token_ids) - len(self._cached(head)) * self.config.block_size

    def _publish(self, seq: Sequence) -> None:
        """Cache the blocks that are full of computed tokens. Nothing may write to them any more."""
        num_full = seq.num_computed_tokens // self.config.block_size
        if num_full <= seq.num_published_blocks or seq.prefix is None:
            return
        digests = seq.prefix.first(num_full, seq.token_ids)
        for index in range(seq.num_published_blocks, num_full):
            self.blocks.publish(seq.block_ids[index], digests[index])
        seq.num_published_blocks = num_full

    def _grow(self, seq: Sequence, num_tokens: int, preempted: list[str]) -> bool:
        """Grow the blocks of ``seq`` to ``num_tokens`` tokens, and preempt lower requests if necessary. Returns False
        if ``seq`` must wait, as it does for steps in flight."""
        while not self.blocks.allocate(seq.arrival, num_tokens):
            if self._in_flight:
                return False
            lower = [s for s in self._running[self._running.index(seq) + 1 :] if not s.pinned]
            if not self.blocks.owned_only_by([s.arrival for s in lower]):
                return False
            self._preempt(lower[-1])
            preempted.append(lower[-1].attempt_id)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        seq.transition(EngineStatus.PREEMPTED)
        seq.num_computed_tokens = 0
        seq.queued_s = self._clock.now()
        self._forget_drafts(seq)
        self._free(seq)
        insort(self._preempted, seq, key=_rank)
        self._preemptions += 1

    def _draft(
        self, drafter: Drafter, parts: list[tuple[Sequence, int]], left: int
    ) -> tuple[dict[Sequence, list[int]], float | None]:
        """The drafts of requests among ``parts``, at most ``left`` in all, and when the drafter was done, if its
        guesses cost anything."""
        policy, rows = self._draft_policy, sum(num_tokens for _, num_tokens in parts)
        tokens = sum(seq.num_uncomputed_tokens == num_tokens for seq, num_tokens in parts)
        least_outputs = 1 if drafter.free else _LEAST_OUTPUTS
        decoding: list[tuple[Sequence, Speculation, int]] = []
        for seq, _ in parts:
            speculation = seq.speculation
            if speculation is None or not _decodes_known(seq) or seq.num_output_tokens < least_outputs:
                continue
            to_come = seq.max_tokens - seq.num_output_tokens - 1
            most = min(MAX_DRAFTS, to_come, drafter.max_context - len(seq.token_ids))
            if most > 0 and drafter.missing(_context(seq, most)) <= MOST_MISSING * to_come:
                decoding.append((seq, speculation, most))
            else:
                speculation.rest(policy.rest_steps)
        if not drafter.free:
            guesses = [(speculation, most) for _, speculation, most in decoding]
            worth = policy.worth_preparing(guesses, rows, tokens, left)
            for (_, speculation, _), is_worth in zip(decoding, worth, strict=True):
                if not is_worth:
                    speculation.rest(policy.rest_steps)
            decoding = [each for each, is_worth in zip(decoding, worth, strict=True) if is_worth]
        if not decoding:
            return {}, None
        budget = left if self.config.chunk_tokens is None else min(left, self.config.chunk_tokens)
        ready = drafter.prepare([_context(seq, most) for seq, _, most in decoding], budget)
        guesses = [(speculation, count) for (_, speculation, _), count in zip(decoding, ready, strict=True)]
        wanted: list[tuple[Sequence, DraftContext]] = []
        for (seq, _, _), length in zip(decoding, policy.lengths(guesses, rows, tokens, left), strict=True):
            if length and (num_drafts := self._cut_drafts(seq, length)):
                wanted.append((seq, _context(seq, num_drafts)))
        began_s = self._clock.now()
        found = drafter.propose([context for _, context in wanted]) if wanted else []
        drafted_s = None if drafter.free else self._clock.now()
        if drafted_s is not None and any(found):
            policy.observe_passes([context.most for _, context in wanted], drafted_s - began_s)
        drafts = {seq: fits for (seq, _), guess in zip(wanted, found, strict=True) if (fits := seq.possible(guess))}
        for seq in drafts:
            assert seq.speculation is not None
            seq.speculation.waits = True  # where it goes on is known when they are verified
        return drafts, drafted_s

    def _observe_next(self, seq: Sequence, speculation: Speculation, token_id: int, cost: float | None) -> None:
        """Note whether the guess of the next token of ``seq``, which no step has verified, would have been right, if
        that costs nothing."""
        assert self._drafter is not None
        guess = seq.possible(self._drafter.propose([_context(seq, 1)])[0]) if self._drafter.free else []
        speculation.observe(int(guess == [token_id]), len(guess), cost)

    def _forget_drafts(self, seq: Sequence) -> None:
        if self._drafter is not None and seq.speculation is not None:
            self._drafter.forget(seq.attempt_id)

    def _cut_drafts(self, seq: Sequence, wanted: int) -> int:
        """How many of ``wanted`` drafts have a place in blocks of ``seq``, or in blocks that are free and not kept for
        others to grow."""
        computed = seq.num_scheduled_tokens + 1
        missing = self.blocks.blocks_for(computed + wanted) - len(seq.block_ids)
        if missing <= 0:
            return wanted
        if self.blocks.free_blocks - missing >= self._watermark:
            self.blocks.allocate(seq.arrival, computed + wanted)
        return min(wanted, len(seq.block_ids) * self.config.block_size - computed)

    def _accept(
        self,
        seq: Sequence,
        part: ScheduledSeq,
        reason: FinishReason | None,
        after: Seq[SampledToken],
        step: Step,
        draft_cost: float | None,
    ) -> FinishReason | None:
        """Add the tokens ``after`` accepted drafts to ``seq`` and to ``step``, whose last token is the one before them.
        ``reason`` is its finish reason; returns that of the last token."""
        place = len(step.tokens) - 1
        first = step.tokens[place]
        for draft, token in zip(part.token_ids[-part.num_drafts :], after, strict=True):
            if reason is not None or seq.token_ids[-1] != draft:
                break
            seq.num_computed_tokens += 1
            reason = seq.append(token.token_id)
            if seq.error:
                break
            finish_reason = "" if reason is None else reason.value
            step.tokens.append(
                TokenOut(seq.attempt_id, token.token_id, finish_reason, first.first_scheduled_s, token.logprobs)
            )
        accepted = len(step.tokens) - 1 - place
        compared = part.num_drafts if reason is None else accepted
        self._draft_tokens += part.num_drafts
        self._accepted_draft_tokens += accepted
        self._draft_policy.observe_drafts(accepted, compared)
        if seq.speculation is not None:
            seq.speculation.observe(accepted, compared, draft_cost)
        step.tokens[place] = msgspec.structs.replace(
            first, draft_tokens=part.num_drafts, accepted_draft_tokens=accepted
        )
        return reason

    def _learn_cost(self, parts: list[ScheduledSeq], step_s: float) -> float | None:
        """Note the time of a step of ``parts``, and return what a draft costs in one like it."""
        rows = sum(len(part.token_ids) for part in parts)
        only_decodes = all(part.decodes for part in parts)
        self._draft_policy.observe(rows, len(parts), step_s if only_decodes else None)
        return self._draft_policy.cost(rows, len(parts))

    def _launch(
        self,
        parts: list[tuple[Sequence, int]],
        started_s: float,
        preempted: list[str] | None = None,
        drafts: Mapping[Sequence, list[int]] | None = None,
        drafted_s: float | None = None,
    ) -> SchedulerOutput:
        """The step of ``parts`` (requests, and how many of their tokens) with ``drafts``, which were known at
        ``drafted_s``. It is in flight now unless there are no parts."""
        if drafts:
            taken = [self._take(seq, num_tokens, drafts.get(seq, ())) for seq, num_tokens in parts]
        else:
            taken = [self._take(seq, num_tokens) for seq, num_tokens in parts]
        output = SchedulerOutput(taken, started_s, preempted or [], drafted_s)
        if parts:
            self._in_flight.append((output, [seq for seq, _ in parts]))
        return output

    @staticmethod
    def _take(seq: Sequence, num_tokens: int, drafts: Collection[int] = ()) -> ScheduledSeq:
        start = seq.num_computed_tokens + seq.num_running_tokens
        end, num_known = start + num_tokens, len(seq.token_ids)
        sample = end == num_known + seq.num_pending_tokens
        token_ids = seq.token_ids[start:end]
        if end > num_known:
            token_ids.append(PENDING)
        seq.num_running_steps += 1
        seq.num_running_tokens += num_tokens
        seq.num_pending_tokens += sample
        prompt, num_drafts = seq.prompt_logprobs, len(drafts)
        token_ids += drafts
        return ScheduledSeq(
            seq.attempt_id, token_ids, start, seq.block_ids, sample, seq.params, seq.history, prompt, num_drafts
        )

    def _take_back(self, part: ScheduledSeq, seq: Sequence) -> bool:
        """Undo `_take`. Returns whether blocks were freed, because the request has ended meanwhile."""
        seq.num_running_steps -= 1
        seq.num_running_tokens -= len(part.token_ids) - part.num_drafts
        seq.num_pending_tokens -= part.sample
        ended = seq.status is not EngineStatus.RUNNING
        if ended and not seq.num_running_steps and self._seqs.get(seq.attempt_id) is not seq:
            self._free(seq)
            return True
        return False

    def _reject_mismatch(self, seq: Sequence) -> bool:
        """Whether the output of ``seq`` cannot go on; then it is dropped."""
        if not seq.error:
            return False
        self.reject(seq.attempt_id, InvalidRequest(f"structured_outputs: {seq.error}"))
        self.abort(seq.attempt_id)
        return True

    def _finish(self, seq: Sequence) -> None:
        """End a running request. It keeps its blocks until `release` if the connector wants to hold them."""
        seq.transition(EngineStatus.FINISHED)
        if self.connector.release(seq):
            self._forget(seq)

    def _unpin_prefix(self, attempt_id: str) -> None:
        if self.blocks.free(attempt_id):  # the other owners of blocks are requests, by their numbers
            self._reserve()

    def _forget(self, seq: Sequence) -> None:
        del self._seqs[seq.attempt_id]
        self._forget_drafts(seq)
        if not seq.num_running_steps:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        self.blocks.free(seq.arrival)
        seq.block_ids = []
        seq.num_published_blocks = 0


def _rank(seq: Sequence) -> tuple[int, bool, int]:
    return seq.rank


def _decodes_known(seq: Sequence) -> bool:
    """Whether what it computes next is its last token, which is known, and nothing outside the engine reads its
    blocks."""
    return seq.num_uncomputed_tokens == 1 and not seq.num_pending_tokens and not seq.pinned


def _context(seq: Sequence, most: int) -> DraftContext:
    return DraftContext(seq.attempt_id, seq.token_ids, seq.block_ids, most)
