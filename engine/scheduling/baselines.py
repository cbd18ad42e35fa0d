"""Baseline schedulers for experiments: static batches, and prompts that are never cut."""

from __future__ import annotations

from bisect import insort
from typing import Literal

from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError

ChunkTokens = int | Literal["off"] | None
"""The option ``engine.chunk_tokens``: how many tokens of one prompt a step may compute. None: as many as the budget has
left; ``off``: the whole prompt or nothing."""


class StaticBatching(Scheduler):
    """Admits a whole batch when no request of the last batch runs, even if one step cannot compute all of it.

    No request joins a running batch. A request whose KV arrives meanwhile waits with its blocks. It ranks below the
    batch and is part of the next one that has fewer than ``max_num_seqs`` requests. A preempted request leaves its
    batch. So every batch only shrinks, and ends.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock, connector: KVConnector | None = None) -> None:
        super().__init__(config, clock, connector)
        self._members: set[Sequence] = set()  # of the batch, including requests that have finished

    def schedule(self) -> SchedulerOutput:
        """Return the next step of the batch, or the first step of a new batch."""
        if not self._runs():
            self._form_batch()
        return super().schedule()

    def _runs(self) -> bool:
        """Whether any request of the batch runs."""
        return any(seq in self._members for seq in self._running)

    def _form_batch(self) -> None:
        self._members = set(self._batch())
        while True:
            self._reserve()
            head = super()._admissible(len(self._members))
            if head is None:
                return
            self._members.add(head)
            self._start(head)

    def _batch(self) -> list[Sequence]:
        """The running requests of the batch, or of the next batch if there are none."""
        return [seq for seq in self._running if seq in self._members] or self._running[: self.config.max_num_seqs]

    def _join(self, seq: Sequence) -> None:
        insort(self._running, seq, key=lambda each: (each not in self._members, each.arrival))

    def _admissible(self, num_running: int) -> Sequence | None:
        return None if self._runs() else super()._admissible(num_running)


class WholePrompts(Scheduler):
    """Never cuts a prompt. A prompt that does not fit beside the decodes gets a step of its own, whatever the budget.
    At most every second step is such a step, so that prompts and decodes both advance."""

    def __init__(self, config: SchedulerConfig, clock: Clock, connector: KVConnector | None = None) -> None:
        super().__init__(config, clock, connector)
        self._last_was_alone = False  # the last step computed one long prompt only

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
        return SchedulerOutput([self._take(long, long.num_uncomputed_tokens, started_s)], started_s, [])

    def _cut(self, seq: Sequence, num_tokens: int) -> int:
        return 0 if seq.computes_prompt else num_tokens

    def _too_long(self) -> Sequence | None:
        """The next prompt, if it does not fit beside the decodes."""
        batch = self._batch()
        seq = next((seq for seq in batch if seq.num_uncomputed_tokens > 1 and seq.computes_prompt), None)
        if seq is not None:
            wanted = seq.num_uncomputed_tokens
        elif (seq := self._admissible(len(batch))) is not None:
            wanted = self._to_compute(seq)
        else:
            return None
        return seq if self._budget(batch).offer(wanted, first=True) < wanted else None


class StaticWholePrompts(StaticBatching, WholePrompts):
    """Static batches of whole prompts."""


def scheduler_class(batching: str, chunk_tokens: ChunkTokens) -> type[Scheduler]:
    """The scheduler for the options ``engine.batching`` and ``engine.chunk_tokens``; `ConfigError` for a ``batching``
    that is neither continuous nor static."""
    if batching not in ("continuous", "static"):
        raise ConfigError(f"engine.batching: must be continuous or static, got {batching!r}")
    if chunk_tokens == "off":
        return StaticWholePrompts if batching == "static" else WholePrompts
    return StaticBatching if batching == "static" else Scheduler
