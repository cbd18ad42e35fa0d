"""Who computes how many tokens in the next step, and who owns the blocks for it.

A step is ``{request: num_tokens}`` under one token budget. There is no prefill or decode branch: a request has tokens
whose KV is not computed yet, one while it decodes and many while it prefills, and gets some or all of them computed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.messages import (
    Abort,
    Computed,
    Finished,
    KVReady,
    KVRole,
    Load,
    Progress,
    Rejected,
    Release,
    Reserved,
    Submit,
    TokenOut,
)
from engine.scheduling.batch import SampledToken, ScheduledSeq, StepResult
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.prefix_cache import PrefixDigests
from engine.scheduling.scheduler_config import SchedulerConfig
from engine.scheduling.sequence import Sequence
from engine.scheduling.token_budget import TokenBudget
from pdserve.core.clock import Clock
from pdserve.core.errors import CapacityExceeded, InvalidRequest, PdserveError, to_wire
from pdserve.core.handoff import FirstToken
from pdserve.core.request import EngineStatus
from pdserve.core.sampling import FinishReason

SchedulerEvent = Reserved | Computed | Rejected | Finished

WATERMARK_DIVISOR = 100  # 1 % of the pool is kept for the growth of what runs


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step to run: its parts, when it was scheduled (seconds of the injected clock), and whom it cost their blocks.
    Empty ``seqs`` mean that nothing can run; such an output needs no `Scheduler.update`."""

    seqs: list[ScheduledSeq]
    started_s: float
    preempted: list[str]


class Scheduler:
    """Batching with chunked prefill over a paged pool with a prefix cache; drives nothing itself.

    The engine loop feeds it commands, and alternates `schedule` and `update`. Commands may come in between: a request
    aborted while its step runs keeps its blocks until `update`, because that step may still write to them.

    **Order.** Requests have a rank by arrival. Running ones go first, in that order: each decoding one gets a token,
    then chunks of prompts get the rest of the budget (whoever comes first gets a token in any case). Then preempted
    ones, then waiting ones, first come first served across all KV roles: whoever cannot be admitted holds up all behind
    it. Admission takes the blocks of all known tokens at once, so only decoding ever grows; it leaves a
    small watermark free while anything else may grow.

    **Prefix cache.** Admission takes over the blocks that hold the beginning of its tokens, owned by others or not, and
    computes the rest: one token at least, since a token must come of it (a RECEIVE request awaits the rest, which may
    be nothing). A full block becomes findable when the step that wrote it is done, or when `KVReady` says that it was
    received and verified. It is never written again: requests write at positions that are not computed, and
    those lie in blocks of their own.

    **Static batching.** A batch is admitted when no request of the last one runs; none joins it. A RECEIVE request
    whose KV comes meanwhile stands by with its blocks, ranks behind the whole batch, and is in the next one (or the one
    after: ``max_num_seqs`` bounds a batch). A preempted request leaves its batch.

    **Progress.** When a running request needs a block and none is free, running requests of lower rank are preempted,
    the lowest first, until one is; but none is if all their blocks together have other owners as well: then the needy
    one keeps its blocks and waits. PUSH requests are exempt, and harmless: they never grow. Hence
    (1) the highest of the running requests is never preempted, and every step (every second one, where a prompt took
    the last for its own) computes at least one token of it, or else every block it does not own has an owner among the
    running PUSH requests, the highest of which then gets its tokens, or the WAITING_FOR_KV or held PUSH requests (which
    end by `KVReady`, `Release` or `Abort`: the worker's leases bound them). That a block has several owners changes
    nothing in this: it only makes some preemptions useless, and those are not done; and what a cached block saves at
    admission can be taken from nobody, for a block that nobody owns counts as free whether it is cached or not;
    (2) it finishes after at most prompt + ``max_tokens`` of such steps, for recomputation is a loss of lower ones
    only, and then the next is the highest. With static batching nobody outranks the batch, and as it only shrinks, it
    ends;
    (3) while anything is preempted or waiting, nothing that came later is admitted or reserved, so only finitely many
    requests run before it, and once those are gone it fits: `submit` refuses what exceeds an empty pool, and an idle
    pool has no watermark. So nothing starves, and no cycle of preemptions can repeat for ever. A request admitted
    in the step that preempted it could take the blocks back before they are used; so none is admitted in such a step.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self._clock = clock
        self._watermark = max(1, config.num_blocks // WATERMARK_DIVISOR)
        self._seqs: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # by arrival
        self._running: list[Sequence] = []  # by rank: the batch, then (static) who stands by
        self._receiving: dict[str, Sequence] = {}
        self._in_step: list[Sequence] = []
        self._events: list[SchedulerEvent] = []
        self._arrivals = 0
        self._preemptions = 0
        self._looked_up_tokens = 0
        self._cached_tokens = 0
        self._static = config.batching == "static"
        self._last_was_alone = False  # the last step was a long prompt's own

    # --- commands ----------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Queue a request, or answer with a `Rejected` event: what can never fit is `CapacityExceeded`; an empty
        prompt, a ``max_tokens`` below 1 or an id in use is `InvalidRequest`."""
        error = self._objection(submit)
        if error is not None:
            self._events.append(Rejected(submit.attempt_id, *to_wire(error)))
            return
        seq = Sequence.from_submit(submit, self._arrivals, self.config.eos_token_ids)
        if self.config.prefix_caching:
            seq.prefix = PrefixDigests(submit.request.salt, self.config.block_size)
        self._arrivals += 1
        self._seqs[seq.attempt_id] = seq
        self._waiting.append(seq)
        self._reserve()

    def kv_ready(self, ready: KVReady) -> None:
        """Let a RECEIVE request run: its prompt's KV is in its blocks, its first token is known. If that is its last
        (by length or stop id) it is finished, and a `Finished` event says so. Ignored unless the request waits for its
        KV."""
        seq = self._receiving.pop(ready.attempt_id, None)
        if seq is None:
            return
        seq.num_computed_tokens = seq.num_prompt_tokens
        self._publish(seq)
        seq.transition(EngineStatus.RUNNING)
        reason = seq.append(ready.first_token_id)
        if reason is None:
            seq.in_batch = not self._static
            insort(self._running, seq, key=_rank)
        else:
            self._events.append(Finished(seq.attempt_id, reason.value))
            self._finish(seq)
            self._reserve()

    def release(self, release: Release) -> None:
        """Free the held blocks of a PUSH request; one that still prefills will free them when it has its token.
        Ignored for any other."""
        seq = self._seqs.get(release.attempt_id)
        if seq is None or seq.kv_role is not KVRole.PUSH:
            return
        seq.released = True
        if seq.status is EngineStatus.FINISHED:
            self._forget(seq)
            self._reserve()

    def abort(self, abort: Abort) -> None:
        """Drop a request in whatever state it is in; unknown ids are ignored. Its blocks are free at once, or after the
        step that computes it just now."""
        seq = self._seqs.get(abort.attempt_id)
        if seq is None:
            return
        match seq.status:
            case EngineStatus.WAITING:
                self._waiting.remove(seq)
            case EngineStatus.WAITING_FOR_KV:
                del self._receiving[seq.attempt_id]
            case EngineStatus.RUNNING:
                self._running.remove(seq)
            case EngineStatus.PREEMPTED:
                self._preempted.remove(seq)
            case EngineStatus.FINISHED:
                pass
        if seq.status is not EngineStatus.FINISHED:
            seq.transition(EngineStatus.FINISHED)
        self._forget(seq)
        self._reserve()

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return anything to run now."""
        batch = self._batch() or self._running[: self.config.max_num_seqs]
        if batch and self._can_run(batch):
            return True
        if self._static and self._batch():
            return False
        return self._admissible(len(batch)) is not None

    def schedule(self) -> SchedulerOutput:
        """The next step. AssertionError if the last one was not brought to `update`."""
        if self._in_step:
            raise AssertionError("schedule() was called while a step runs")
        started_s = self._clock.now()
        is_open = not self._static or not self._batch()
        if is_open and self._static:
            self._form_batch()
        if self._last_was_alone or (seq := self._oversized(is_open)) is None:
            output = self._common_step(started_s, is_open)
            if output.seqs or output.preempted or (seq := self._oversized(is_open)) is None:
                self._last_was_alone = False
                return output
        self._last_was_alone = True
        if seq.status is not EngineStatus.RUNNING:
            self._start(seq)
            self._reserve()
        return SchedulerOutput([self._take(seq, seq.num_uncomputed_tokens, started_s)], started_s, [])

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, list[SampledToken]], sampled_s: float
    ) -> StepResult:
        """Take a step's results in: ``sampled`` has the next tokens, at least one, of each part that asked for any
        (KeyError if not). Those after a request's last one (by stop id or length) are dropped. ``sampled_s`` is when
        they were known, in seconds of the clock. Requests aborted meanwhile are left out."""
        step = StepResult(sampled_s, output.started_s)
        in_step, self._in_step = self._in_step, []
        any_ended = False
        for part, seq in zip(output.seqs, in_step, strict=True):
            seq.in_step = False
            if seq.status is not EngineStatus.RUNNING:  # aborted meanwhile
                self._free(seq)
                any_ended = True
                continue
            seq.num_computed_tokens += len(part.token_ids)
            self._publish(seq)
            is_push = seq.kv_role is KVRole.PUSH
            if not part.sample:
                if is_push:
                    step.progress.append(Progress(seq.attempt_id, seq.num_computed_tokens, list(seq.block_ids)))
                continue
            first_scheduled_s = output.started_s if seq.first_scheduled_s is None else seq.first_scheduled_s
            for token in sampled[seq.attempt_id]:
                reason = seq.append(token.token_id)
                finish_reason = reason.value if reason else ""
                cached = seq.num_cached_tokens if seq.num_output_tokens == 1 else 0
                step.tokens.append(
                    TokenOut(seq.attempt_id, token.token_id, finish_reason, first_scheduled_s, token.logprobs, cached)
                )
                if is_push:
                    first = FirstToken(token.token_id, reason is FinishReason.STOP)
                    step.progress.append(
                        Progress(seq.attempt_id, seq.num_computed_tokens, list(seq.block_ids), first_token=first)
                    )
                if reason is not None or is_push:
                    any_ended = True
                    self._finish(seq)
                    break
        if any_ended:
            self._running = [seq for seq in self._running if seq.status is EngineStatus.RUNNING]
            self._reserve()
        return step

    def pushes(self, output: SchedulerOutput) -> list[Progress]:
        """How far the step that `schedule` made, and that runs now, brings the requests whose KV travels."""
        return [
            Progress(seq.attempt_id, part.start + len(part.token_ids), list(seq.block_ids))
            for part, seq in zip(output.seqs, self._in_step, strict=True)
            if seq.kv_role is KVRole.PUSH
        ]

    # --- looking in --------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """How full the engine is now. Requests that wait for their KV or for the next batch count as waiting, held PUSH
        requests as neither; ``preemptions`` and prompt tokens count since the start."""
        running = len(self._batch())
        waiting = len(self._waiting) + len(self._preempted) + len(self._receiving) + len(self._running) - running
        return Load(
            self.blocks.free_blocks,
            running,
            waiting,
            self._preemptions,
            self._looked_up_tokens,
            self._cached_tokens,
            self.blocks.cached_blocks,
        )

    def take_events(self) -> list[SchedulerEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """AssertionError unless every block is free or owned, and every owner is a request that lives (or whose step
        still runs)."""
        self.blocks.check_integrity()
        owners = {seq.arrival: seq for seq in (*self._seqs.values(), *self._in_step)}
        owned = len({block for arrival in owners for block in self.blocks.blocks(arrival)})
        if owned + self.blocks.free_blocks != self.blocks.num_blocks:
            raise AssertionError(f"{self.blocks.num_blocks - self.blocks.free_blocks - owned} blocks have no request")
        for seq in owners.values():
            if seq.block_ids != self.blocks.blocks(seq.arrival):
                raise AssertionError(f"{seq.attempt_id} does not know its blocks")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _objection(self, submit: Submit) -> PdserveError | None:
        config = self.config
        prompt_tokens = submit.request.num_tokens
        total_tokens = prompt_tokens + submit.max_tokens
        if submit.attempt_id in self._seqs:
            return InvalidRequest(f"attempt_id: {submit.attempt_id!r} is in use in this engine")
        if not submit.request.prompt_token_ids:
            return InvalidRequest("prompt_token_ids: the prompt is empty; it must have at least one token")
        if submit.max_tokens < 1:
            return InvalidRequest(f"max_tokens: {submit.max_tokens} is below 1; ask for at least one token")
        wanted = f"{prompt_tokens} prompt tokens and up to {submit.max_tokens} new ones"
        if total_tokens > config.max_model_len:
            return CapacityExceeded(f"{wanted} exceed max_model_len {config.max_model_len}; shorten one of them")
        here = prompt_tokens if submit.kv_role is KVRole.PUSH else total_tokens  # PUSH decodes elsewhere
        need = self.blocks.blocks_for(here)
        if need > config.num_blocks:
            return CapacityExceeded(
                f"{wanted} need {need} KV blocks of {config.block_size} tokens, the pool has {config.num_blocks}; "
                "shorten one of them or give the engine more KV memory"
            )
        return None

    def _head(self) -> Sequence | None:
        if self._preempted:
            return self._preempted[0]
        return self._waiting[0] if self._waiting else None

    @staticmethod
    def _awaits_kv(seq: Sequence) -> bool:
        """Whether it is to get its KV from elsewhere; once preempted, it computes it here."""
        return seq.kv_role is KVRole.RECEIVE and seq.status is EngineStatus.WAITING

    def _batch(self) -> list[Sequence]:
        """The running requests that may run now, highest first."""
        return [seq for seq in self._running if seq.in_batch] if self._static else self._running

    def _form_batch(self) -> None:
        for seq in self._running[: self.config.max_num_seqs]:
            seq.in_batch = True

    def _can_run(self, batch: list[Sequence]) -> bool:
        """Whether any of ``batch`` can have a block for its next token, or needs none."""
        if self.blocks.free_blocks:
            return True
        size = self.config.block_size
        if any(seq.num_computed_tokens < len(seq.block_ids) * size for seq in batch):
            return True
        # The highest can take from most others: if it gains nothing from them, nobody does.
        return self.blocks.owned_only_by([seq.arrival for seq in self._running[1:] if seq.preemptible])

    def _cached(self, seq: Sequence) -> list[int]:
        """The blocks that hold the beginning of its tokens, as far as it can use them."""
        if seq.prefix is None:
            return []
        usable = seq.num_prompt_tokens if self._awaits_kv(seq) else len(seq.token_ids) - 1
        return self.blocks.find(seq.prefix.first(usable // self.config.block_size, seq.token_ids))

    def _fits(self, seq: Sequence) -> bool:
        kept = self._watermark if self._running or self._receiving else 0
        return self.blocks.cost(len(seq.token_ids), self._cached(seq)) + kept <= self.blocks.free_blocks

    def _admissible(self, num_running: int) -> Sequence | None:
        """The first in line, if it can begin to compute now beside ``num_running`` others."""
        head = self._head()
        if head is None or self._awaits_kv(head) or num_running >= self.config.max_num_seqs:
            return None
        return head if self._fits(head) else None

    def _admit(self, head: Sequence) -> int:
        """Give the first in line the blocks of all its tokens, and take it out of the line; returns how many of them
        hold the right content."""
        cached = self._cached(head)
        if not self.blocks.allocate(head.arrival, len(head.token_ids), cached):
            raise AssertionError(f"{head.attempt_id} was admitted, but does not fit")
        head.block_ids = self.blocks.blocks(head.arrival)
        head.num_published_blocks = len(cached)
        if head.status is EngineStatus.PREEMPTED:
            del self._preempted[0]
            return len(cached)
        self._waiting.popleft()
        if head.prefix is not None:
            self._looked_up_tokens += head.num_prompt_tokens
            self._cached_tokens += len(cached) * self.config.block_size
        return len(cached)

    def _start(self, head: Sequence) -> None:
        """Admit the first in line to compute its tokens here; it must be `_admissible`."""
        is_new = head.status is EngineStatus.WAITING
        cached = self._admit(head)
        head.num_computed_tokens = cached * self.config.block_size
        if is_new and cached:
            head.num_cached_tokens = head.num_computed_tokens
            if head.kv_role is KVRole.PUSH:
                found = Progress(head.attempt_id, head.num_cached_tokens, head.block_ids[:cached])
                self._events.append(Computed([found]))
        head.transition(EngineStatus.RUNNING)
        head.in_batch = True
        insort(self._running, head, key=_rank)

    def _reserve(self) -> None:
        """Make room for the RECEIVE requests at the head of the line; to be called whenever the head or the free blocks
        have changed."""
        while (head := self._head()) is not None and self._awaits_kv(head) and self._fits(head):
            cached = self._admit(head)
            head.transition(EngineStatus.WAITING_FOR_KV)
            self._receiving[head.attempt_id] = head
            self._events.append(Reserved(head.attempt_id, list(head.block_ids), cached, self._clock.now()))

    def _common_step(self, started_s: float, is_open: bool) -> SchedulerOutput:
        """A step for all that run, and for new ones if it ``is_open`` to them."""
        config = self.config
        seqs: list[ScheduledSeq] = []
        preempted: list[str] = []
        batch = self._batch()[:]
        budget = self._budget(batch[: config.max_num_seqs])
        for seq in batch:
            if len(seqs) == config.max_num_seqs:
                break  # KVReady is not refused, so that more may run than fit into a step
            if seq.status is not EngineStatus.RUNNING:
                continue  # preempted in this very loop
            wanted = seq.num_uncomputed_tokens
            num_tokens = budget.offer(wanted, first=not seqs, is_prompt=seq.computes_prompt)
            if num_tokens and self._grow(seq, seq.num_computed_tokens + num_tokens, preempted):
                seqs.append(self._take(seq, num_tokens, started_s))
                budget.spend(num_tokens, wanted)
        # What has just been preempted must not be admitted to the blocks it was to make room in.
        while is_open and not preempted:
            self._reserve()
            head = self._admissible(len(self._batch()))
            if head is None:
                break
            wanted = self._to_compute(head)
            num_tokens = budget.offer_new(wanted)
            if not num_tokens and not self._static:  # a static batch is admitted as a whole
                break
            self._start(head)
            if num_tokens:
                seqs.append(self._take(head, num_tokens, started_s))
                budget.spend(num_tokens, wanted)
        return SchedulerOutput(seqs, started_s, preempted)

    def _budget(self, batch: list[Sequence]) -> TokenBudget:
        num_decodes = sum(seq.num_uncomputed_tokens == 1 for seq in batch)
        return TokenBudget(self.config.max_num_batched_tokens, num_decodes, self.config.chunk_tokens)

    def _to_compute(self, head: Sequence) -> int:
        return len(head.token_ids) - len(self._cached(head)) * self.config.block_size

    def _oversized(self, is_open: bool) -> Sequence | None:
        """The prompt whose turn it is, if it must not be cut and has no room beside the decodes: it needs a step of its
        own."""
        if self.config.chunk_tokens != "off":
            return None
        batch = self._batch()
        seq = next((seq for seq in batch if seq.num_uncomputed_tokens > 1 and seq.computes_prompt), None)
        wanted = 0
        if seq is not None:
            wanted = seq.num_uncomputed_tokens
        elif is_open and (seq := self._admissible(len(batch))) is not None:
            wanted = self._to_compute(seq)
        return seq if wanted > 1 and not self._budget(batch).offer(wanted, first=True) else None

    def _publish(self, seq: Sequence) -> None:
        """Let others find the blocks that are full of computed tokens; only when nothing writes to them any more."""
        num_full = seq.num_computed_tokens // self.config.block_size
        if seq.prefix is None or num_full <= seq.num_published_blocks:
            return
        digests = seq.prefix.first(num_full, seq.token_ids)
        for index in range(seq.num_published_blocks, num_full):
            self.blocks.publish(seq.block_ids[index], digests[index])
        seq.num_published_blocks = num_full

    def _grow(self, seq: Sequence, num_tokens: int, preempted: list[str]) -> bool:
        """Have ``seq``'s blocks cover ``num_tokens`` tokens, at the cost of lower ranks if need be; False: it must
        wait."""
        if num_tokens <= len(seq.block_ids) * self.config.block_size:
            return True
        while not self.blocks.allocate(seq.arrival, num_tokens):
            lower = [s for s in self._running[self._running.index(seq) + 1 :] if s.preemptible]
            if not self.blocks.owned_only_by([s.arrival for s in lower]):
                return False
            self._preempt(lower[-1])
            preempted.append(lower[-1].attempt_id)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        seq.transition(EngineStatus.PREEMPTED)
        seq.num_computed_tokens = 0
        self._free(seq)
        insort(self._preempted, seq, key=_arrival)
        self._preemptions += 1

    def _take(self, seq: Sequence, num_tokens: int, started_s: float) -> ScheduledSeq:
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = started_s
        seq.in_step = True
        self._in_step.append(seq)
        start = seq.num_computed_tokens
        end = start + num_tokens
        return ScheduledSeq(
            attempt_id=seq.attempt_id,
            token_ids=seq.token_ids[start:end],
            start=start,
            block_ids=seq.block_ids,
            sample=end == len(seq.token_ids),
            params=seq.params,
            history=seq.history,
        )

    def _finish(self, seq: Sequence) -> None:
        """End a running request; a PUSH request stays, with its blocks, until it is released."""
        seq.transition(EngineStatus.FINISHED)
        if seq.kv_role is not KVRole.PUSH or seq.released:
            self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        del self._seqs[seq.attempt_id]
        if not seq.in_step:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        self.blocks.free(seq.arrival)
        seq.block_ids = []
        seq.num_published_blocks = 0


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _rank(seq: Sequence) -> tuple[bool, int]:
    return not seq.in_batch, seq.arrival
