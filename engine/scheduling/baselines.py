"""Baseline schedulers for experiments: static batches, prompts that are never cut, and contiguous reservation."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Literal

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock

ChunkTokens = int | Literal["off"] | None
"""The option ``engine.chunk_tokens``: how many tokens of one prompt a step may compute. None: as many as the budget has
left; ``off``: the whole prompt or nothing."""


class StaticBatching(Scheduler):
    """Admits a whole batch when no request of the last batch runs, even if one step cannot compute all of it.

    No request joins a running batch. A request whose KV arrives meanwhile waits with its blocks. It ranks below the
    batch and is part of the next one that has fewer than ``max_num_seqs`` requests. A preempted request leaves its
    batch. So every batch only shrinks, and ends. If the blocks that a batch lacks are pinned for requests that wait
    with theirs, these run first, one at a time: a pinned request needs no further block.
    """

    _members: Collection[Sequence] = ()  # of the batch, including requests that have finished
    _instead: Sequence | None = None  # the request that runs instead of the batch

    @property
    def has_work(self) -> bool:
        """See `Scheduler.has_work`."""
        return super().has_work or self._holder() is not None

    def schedule(self) -> SchedulerOutput:
        """Return the next step of the batch, or the first step of a new batch."""
        if not self._in_flight:
            self._instead = self._holder()
        if not self._runs():
            self._form_batch()
        return super().schedule()

    def _holder(self) -> Sequence | None:
        """A pinned request outside of the batch that holds blocks, if the batch can get none."""
        batch = [seq for seq in self._running if seq in self._members]
        if self._in_flight or not batch or self._can_run(batch):
            return None
        return next((seq for seq in self._running if seq.pinned and seq not in self._members), None)

    def _runs(self) -> bool:
        """Whether any request of the batch runs."""
        return any(seq in self._members for seq in self._running)

    def _form_batch(self) -> None:
        self._members = members = set(self._batch())
        while True:
            self._reserve()
            head = super()._admissible(len(self._members))
            if head is None:
                return
            members.add(head)
            self._start(head)

    def _batch(self) -> list[Sequence]:
        """The running requests of the batch, or of the next batch if there are none."""
        if self._instead in self._running:
            return [self._instead]
        return [seq for seq in self._running if seq in self._members] or self._running[: self.config.max_num_seqs]

    def _join(self, seq: Sequence) -> None:
        insort(self._running, seq, key=lambda each: (each not in self._members, each.rank))

    def _admissible(self, num_running: int) -> Sequence | None:
        return None if self._runs() else super()._admissible(num_running)

    def _displacing(self) -> None:
        return None


class WholePrompts(Scheduler):
    """Never cuts a prompt. A prompt that does not fit beside the decodes gets a step of its own, whatever the budget.
    At most every second step is such a step, so that prompts and decodes both advance."""

    _last_was_alone = False  # the last step computed one long prompt only

    def schedule(self) -> SchedulerOutput:
        """Return the next step, which may compute a single long prompt."""
        started_s = self._begin_step()
        long = None if self._last_was_alone else self._too_long()
        if long is None:
            output = super().schedule()
            if output.seqs or output.preempted or (long := self._too_long()) is None:
                self._last_was_alone = False
                return output
        self._last_was_alone = True
        if long not in self._running:
            self._start(long)
            self._reserve()
        return self._launch([(long, long.num_uncomputed_tokens)], started_s)

    def _cut(self, seq: Sequence, num_tokens: int) -> int:
        return 0 if seq.computes_prompt else num_tokens

    def _too_long(self) -> Sequence | None:
        """The next prompt, if it does not fit beside the decodes."""
        batch = self._ready()
        seq = next((seq for seq in batch if seq.num_uncomputed_tokens > 1 and seq.computes_prompt), None)
        if seq is not None:
            wanted = seq.num_uncomputed_tokens
        elif (seq := self._admissible(len(self._batch()))) is not None:
            wanted = self._to_compute(seq)
        else:
            return None
        budget = self._budget([each.num_uncomputed_tokens for each in batch])
        return seq if budget.offer(wanted, first=True) < wanted else None


class StaticWholePrompts(StaticBatching, WholePrompts):
    """Static batches of whole prompts."""


class ContiguousBlocks(BlockManager):
    """Blocks that are reserved as runs of successive numbers, as memory without paging has to be."""

    def first_run(self, num_blocks: int) -> int | None:
        """The first block of the lowest run of ``num_blocks`` free ones; None if there is none."""
        return next((first for first, length in self._runs() if length >= num_blocks), None)

    @property
    def longest_run(self) -> int:
        """Blocks of the longest run of free ones."""
        return max((length for _, length in self._runs()), default=0)

    def reserve(self, owner: Hashable, num_blocks: int) -> bool:
        """Give the new ``owner`` a run of blocks. False, with nothing changed, if there is none that long."""
        first = self.first_run(num_blocks)
        if first is None:
            return False
        run = range(first, first + num_blocks)
        self._free = [block for block in self._free if block not in run]
        heapq.heapify(self._free)
        self._owned[owner] = list(run)
        for block in run:
            self._owners[block] = 1
        return True

    def _runs(self) -> list[tuple[int, int]]:
        """The runs of free blocks, in order: first block and length."""
        runs: list[tuple[int, int]] = []
        for block in sorted(self._free):
            if runs and sum(runs[-1]) == block:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        return runs


class ContiguousReservation(Scheduler):
    """Reserves the memory of a request's longest possible output when it admits the request, in one run of blocks: its
    prompt and ``max_tokens``, or with ``whole_context`` as much as the longest request of the engine may have. So a
    request never grows and is never preempted; what it does not use stays empty until it ends. There is no prefix
    cache, because runs cannot share blocks. No option of the service selects it."""

    blocks: ContiguousBlocks

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        connector: KVConnector | None = None,
        *,
        whole_context: bool = False,
    ) -> None:
        super().__init__(replace(config, prefix_caching=False), clock, connector)
        self.blocks = ContiguousBlocks(config.num_blocks, config.block_size)
        self._whole_context = whole_context

    def _fits(self, seq: Sequence) -> bool:
        return self.blocks.first_run(self._reservation(seq)) is not None

    def _admit(self, head: Sequence) -> None:
        self.blocks.reserve(head.arrival, self._reservation(head))
        super()._admit(head)

    def _reservation(self, seq: Sequence) -> int:
        """How many blocks ``seq`` gets."""
        tokens = self.config.max_model_len if self._whole_context else seq.num_prompt_tokens + seq.max_tokens
        return min(self.blocks.blocks_for(tokens), self.config.num_blocks)


def scheduler_class(batching: str, chunk_tokens: ChunkTokens) -> type[Scheduler]:
    """The scheduler for the options ``engine.batching`` and ``engine.chunk_tokens``."""
    if chunk_tokens == "off":
        return StaticWholePrompts if batching == "static" else WholePrompts
    return StaticBatching if batching == "static" else Scheduler
