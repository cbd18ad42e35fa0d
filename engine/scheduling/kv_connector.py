"""Where the KV of requests comes from and goes to, as far as the scheduler has to know."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from engine.messages import Computed, KVEvent
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.sequence import Sequence


class KVConnector(Protocol):
    """Moves KV between an engine's blocks and other places: another engine's pool, host memory, a simulated link.

    The scheduler owns the blocks and calls the connector; it never waits for it. The connector answers by
    `Scheduler.kv_ready` (KV that a request awaits is in its blocks) and `Scheduler.release` (nothing reads a request's
    blocks any more), or has its owner call them. It must not call them from within its own methods.
    """

    def remote_tokens(self, seq: Sequence) -> int:
        """How many of the first tokens of the new request ``seq`` get their KV from elsewhere; 0 if it computes all of
        them. If it is all of its tokens, its next token must come with them (see `Scheduler.kv_ready`)."""
        ...

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """``seq`` has the blocks of all its tokens for the first time; the first ``num_cached_blocks`` of them hold the
        right KV. If it has remote tokens, their KV may be written to the other blocks now.

        Returns whether its blocks are pinned: something outside reads them. Then it is never preempted, and `computed`
        follows it. Only a request that makes a single token may be pinned, because that one never grows.
        """
        ...

    def computed(self, seq: Sequence) -> None:
        """A step is done that computed tokens of ``seq``, whose blocks are pinned. Its new tokens are known."""
        ...

    def release(self, seq: Sequence) -> bool:
        """``seq`` computes nothing any more. Returns whether its blocks may go now; if not, they are held until
        `Scheduler.release`. Blocks of an aborted request go in any case."""
        ...

    def layer_hook(self, parts: Seq[ScheduledSeq], send: Callable[[Computed], None]) -> LayerHook | None:
        """What the step that computes ``parts`` has to call as its layers are done, so that ``send`` gets word of their
        KV within the step; None if nothing outside wants to know."""
        ...

    def take_events(self) -> list[KVEvent]:
        """What is to be told outside since the last call, in order."""
        ...


class NoTransfer:
    """The connector of an engine on its own: all KV is computed here and stays here."""

    def remote_tokens(self, seq: Sequence) -> int:
        """None."""
        return 0

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """Nothing is pinned."""
        return False

    def computed(self, seq: Sequence) -> None:
        """Is not called: nothing is pinned."""

    def release(self, seq: Sequence) -> bool:
        """All blocks may go at once."""
        return True

    def layer_hook(self, parts: Seq[ScheduledSeq], send: Callable[[Computed], None]) -> LayerHook | None:
        """None."""
        return None

    def take_events(self) -> list[KVEvent]:
        """There are none."""
        return []
