"""Who computes how many tokens in the next step, and who owns the blocks for it.

A step is ``{request: num_tokens}`` under one token budget. There is no prefill or decode branch: a request has tokens
whose KV is not computed yet, one while it decodes and many while it prefills, and gets some or all of them computed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from core.clock import Clock
from core.errors import CapacityExceeded, ConfigError, InvalidRequest, PdserveError, to_wire
from core.request import EngineStatus
from engine.batch import SampledToken, ScheduledSeq
from engine.block_manager import BlockManager
from engine.messages import Abort, KVReady, KVRole, Load, Progress, Rejected, Release, Reserved, Step, Submit, TokenOut
from engine.sequence import Sequence

WATERMARK_DIVISOR = 100  # 1 % of the pool is kept for the growth of what runs


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one engine. ``max_num_batched_tokens`` and ``max_num_seqs`` bound a step, ``max_model_len`` bounds
    prompt plus output of a request, ``num_blocks`` blocks of ``block_size`` tokens are the pool. All at least 1
    (`ConfigError`). ``eos_token_ids`` end every request that does not ignore them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}: must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step to run: its parts, when it was scheduled (seconds of the injected clock), and whom it cost their blocks.
    Empty ``seqs`` mean that nothing can run; such an output needs no `Scheduler.update`."""

    seqs: list[ScheduledSeq]
    started_s: float
    preempted: list[str]


class Scheduler:
    """Continuous batching with chunked prefill over a paged pool; drives nothing itself.

    The engine loop feeds it commands, and alternates `schedule` and `update`. Commands may come in between: a request
    aborted while its step runs keeps its blocks until `update`, because that step may still write to them.

    **Order.** Requests have a rank by arrival. Running ones go first, in that order: each decoding one gets a token,
    then chunks of prompts get the rest of the budget (whoever comes first gets a token in any case). Then preempted
    ones, then waiting ones, first come first served across all KV roles: whoever cannot be admitted holds up all behind
    it. Admission takes the blocks of all known tokens at once, so only decoding ever grows; it leaves a
    small watermark free while anything else may grow.

    **Progress.** When a running request needs a block and none is free, the running request that came last is
    preempted, unless it came before the needy one; then the needy one keeps its blocks and waits. PUSH requests are
    exempt, and harmless: they never grow. Hence
    (1) the most senior running request is never preempted, and every step computes at least one token of it, or else
    every block it does not own belongs to a running PUSH request, the most senior of which then gets its token, or to a
    WAITING_FOR_KV or held PUSH request (which end by `KVReady`, `Release` or `Abort`: the worker's leases bound them);
    (2) it finishes after at most prompt + ``max_tokens`` of such steps, for recomputation is a loss of the junior ones
    only, and then the next is the most senior;
    (3) while anything is preempted or waiting, nothing that came later is admitted or reserved, so only finitely many
    requests run before it, and once those are gone it fits: `submit` refuses what exceeds an empty pool, and an idle
    pool has no watermark. So nothing starves, and no cycle of preemptions can repeat for ever.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self._clock = clock
        self._watermark = max(1, config.num_blocks // WATERMARK_DIVISOR)
        self._seqs: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # by arrival
        self._running: list[Sequence] = []  # by arrival
        self._receiving: dict[str, Sequence] = {}
        self._in_step: list[Sequence] = []
        self._events: list[Reserved | Rejected] = []
        self._arrivals = 0
        self._preemptions = 0

    # --- commands ----------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Queue a request, or answer with a `Rejected` event: what can never fit is `CapacityExceeded`; an empty
        prompt, a ``max_tokens`` below 1 or an id in use is `InvalidRequest`."""
        error = self._objection(submit)
        if error is not None:
            self._events.append(Rejected(submit.request_id, *to_wire(error)))
            return
        seq = Sequence.from_submit(submit, self._arrivals, self.config.eos_token_ids)
        self._arrivals += 1
        self._seqs[seq.request_id] = seq
        self._waiting.append(seq)
        self._reserve()

    def kv_ready(self, ready: KVReady) -> None:
        """Let a RECEIVE request run: its prompt's KV is in its blocks, its first token is known. If that is its last
        (by length or stop id) it is finished, without an event. Ignored unless the request waits for its KV."""
        seq = self._receiving.pop(ready.request_id, None)
        if seq is None:
            return
        seq.num_computed_tokens = seq.num_prompt_tokens
        seq.transition(EngineStatus.RUNNING)
        if seq.append(ready.first_token_id) is None:
            insort(self._running, seq, key=_arrival)
        else:
            self._finish(seq)
            self._reserve()

    def release(self, release: Release) -> None:
        """Free the held blocks of a PUSH request; one that still prefills will free them when it has its token.
        Ignored for any other."""
        seq = self._seqs.get(release.request_id)
        if seq is None or seq.kv_role is not KVRole.PUSH:
            return
        seq.released = True
        if seq.status is EngineStatus.FINISHED:
            self._forget(seq)
            self._reserve()

    def abort(self, abort: Abort) -> None:
        """Drop a request in whatever state it is in; unknown ids are ignored. Its blocks are free at once, or after the
        step that computes it just now."""
        seq = self._seqs.get(abort.request_id)
        if seq is None:
            return
        match seq.status:
            case EngineStatus.WAITING:
                self._waiting.remove(seq)
            case EngineStatus.WAITING_FOR_KV:
                del self._receiving[seq.request_id]
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
        running, block_size = self._running, self.config.block_size
        # Of two, one can always run: a PUSH request needs no block, and of two others the senior takes the junior's.
        if running and (
            self.blocks.free_blocks
            or len(running) > 1
            or running[0].num_computed_tokens < len(running[0].block_ids) * block_size
        ):
            return True
        head = self._head()
        if head is None or self._awaits_kv(head):
            return False
        return len(running) < self.config.max_num_seqs and self._fits(head)

    def schedule(self) -> SchedulerOutput:
        """The next step. AssertionError if the last one was not brought to `update`."""
        if self._in_step:
            raise AssertionError("schedule() was called while a step runs")
        started_s = self._clock.now()
        config = self.config
        seqs: list[ScheduledSeq] = []
        preempted: list[str] = []
        budget = config.max_num_batched_tokens
        running = self._running[:]
        spare = budget - sum(
            len(seq.token_ids) - seq.num_computed_tokens == 1 for seq in running[: config.max_num_seqs]
        )
        for seq in running:
            if len(seqs) == config.max_num_seqs:
                break  # KVReady is not refused, so that more may run than fit into a step
            if seq.status is not EngineStatus.RUNNING:
                continue  # preempted in this very loop
            num_tokens = len(seq.token_ids) - seq.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, max(spare, 0 if seqs else 1))
                spare -= num_tokens
            num_tokens = min(num_tokens, budget)
            if num_tokens > 0 and self._grow(seq, seq.num_computed_tokens + num_tokens, preempted):
                seqs.append(self._take(seq, num_tokens, started_s))
                budget -= num_tokens
        while not preempted:  # what has just been preempted must not be admitted to the blocks it was to make room in
            self._reserve()
            head = self._head()
            if head is None or self._awaits_kv(head) or budget < 1 or len(self._running) >= config.max_num_seqs:
                break
            if not self._admit(head):
                break
            head.transition(EngineStatus.RUNNING)
            insort(self._running, head, key=_arrival)
            num_tokens = min(head.num_uncomputed_tokens, budget)
            seqs.append(self._take(head, num_tokens, started_s))
            budget -= num_tokens
        return SchedulerOutput(seqs, started_s, preempted)

    def update(self, output: SchedulerOutput, sampled: Mapping[str, list[SampledToken]], sampled_s: float) -> Step:
        """Take a step's results in: ``sampled`` has the next tokens, at least one, of each part that asked for any
        (KeyError if not). Those after a request's last one (by stop id or length) are dropped. ``sampled_s`` is when
        they were known, in seconds of the clock. Requests aborted meanwhile are left out."""
        step = Step(sampled_s, output.started_s)
        in_step, self._in_step = self._in_step, []
        any_ended = False
        for part, seq in zip(output.seqs, in_step, strict=True):
            seq.in_step = False
            if seq.status is not EngineStatus.RUNNING:  # aborted meanwhile
                self._free(seq)
                any_ended = True
                continue
            seq.num_computed_tokens += len(part.token_ids)
            is_push = seq.kv_role is KVRole.PUSH
            if is_push:
                step.progress.append(Progress(seq.request_id, seq.num_computed_tokens, list(seq.block_ids)))
            if not part.sample:
                continue
            first_scheduled_s = output.started_s if seq.first_scheduled_s is None else seq.first_scheduled_s
            for token in sampled[seq.request_id]:
                reason = seq.append(token.token_id)
                finish_reason = reason.value if reason else ""
                step.tokens.append(
                    TokenOut(seq.request_id, token.token_id, finish_reason, first_scheduled_s, token.logprobs)
                )
                if reason is not None or is_push:
                    any_ended = True
                    self._finish(seq)
                    break
        if any_ended:
            self._running = [seq for seq in self._running if seq.status is EngineStatus.RUNNING]
            self._reserve()
        return step

    # --- looking in --------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """How full the engine is now. Requests that wait for their KV count as waiting, held PUSH requests as
        neither; ``preemptions`` counts since the start."""
        waiting = len(self._waiting) + len(self._preempted) + len(self._receiving)
        return Load(self.blocks.free_blocks, len(self._running), waiting, self._preemptions)

    def take_events(self) -> list[Reserved | Rejected]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """AssertionError unless every block has exactly one owner, and that owner is a request that lives (or whose
        step still runs)."""
        self.blocks.check_integrity()
        owners = {seq.arrival: seq for seq in (*self._seqs.values(), *self._in_step)}
        owned = sum(len(self.blocks.blocks(arrival)) for arrival in owners)
        if owned + self.blocks.free_blocks != self.blocks.num_blocks:
            raise AssertionError(f"{self.blocks.num_blocks - self.blocks.free_blocks - owned} blocks have no request")
        for seq in owners.values():
            if seq.block_ids != self.blocks.blocks(seq.arrival):
                raise AssertionError(f"{seq.request_id} does not know its blocks")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _objection(self, submit: Submit) -> PdserveError | None:
        config = self.config
        prompt_tokens = len(submit.prompt_token_ids)
        total_tokens = prompt_tokens + submit.max_tokens
        if submit.request_id in self._seqs:
            return InvalidRequest(f"request_id: {submit.request_id!r} is in use in this engine")
        if not prompt_tokens:
            return InvalidRequest("prompt_token_ids: the prompt is empty; it must have at least one token")
        if submit.max_tokens < 1:
            return InvalidRequest(f"max_tokens: {submit.max_tokens} is below 1; ask for at least one token")
        if not 0 <= submit.num_prior_outputs < prompt_tokens:
            return InvalidRequest(
                f"num_prior_outputs: {submit.num_prior_outputs} of {prompt_tokens} tokens; at least one is a prompt's"
            )
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

    def _fits(self, seq: Sequence) -> bool:
        kept = self._watermark if self._running or self._receiving else 0
        return self.blocks.blocks_for(len(seq.token_ids)) + kept <= self.blocks.free_blocks

    def _admit(self, head: Sequence) -> bool:
        """Give the first in line the blocks of all its tokens, and take it out of the line."""
        if not self._fits(head):
            return False
        self.blocks.allocate(head.arrival, len(head.token_ids))
        head.block_ids = self.blocks.blocks(head.arrival)
        if head.status is EngineStatus.PREEMPTED:
            del self._preempted[0]
        else:
            self._waiting.popleft()
        return True

    def _reserve(self) -> None:
        """Make room for the RECEIVE requests at the head of the line; to be called whenever the head or the free blocks
        have changed."""
        while (head := self._head()) is not None and self._awaits_kv(head) and self._admit(head):
            head.transition(EngineStatus.WAITING_FOR_KV)
            self._receiving[head.request_id] = head
            cached = self.blocks.num_cached_blocks(head.arrival)
            self._events.append(Reserved(head.request_id, list(head.block_ids), cached))

    def _grow(self, seq: Sequence, num_tokens: int, preempted: list[str]) -> bool:
        """Have ``seq``'s blocks cover ``num_tokens`` tokens, at the cost of juniors if need be; False: it must wait."""
        if num_tokens <= len(seq.block_ids) * self.config.block_size:
            return True
        while not self.blocks.allocate(seq.arrival, num_tokens):
            victim = next((s for s in reversed(self._running) if s.preemptible), None)
            if victim is None or victim.arrival <= seq.arrival:
                return False
            self._preempt(victim)
            preempted.append(victim.request_id)
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
            request_id=seq.request_id,
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
        del self._seqs[seq.request_id]
        if not seq.in_step:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        self.blocks.free(seq.arrival)
        seq.block_ids = []


def _arrival(seq: Sequence) -> int:
    return seq.arrival
