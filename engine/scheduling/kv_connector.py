"""The interface between the scheduler and KV transfer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.messages import Computed, KVEvent
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.sequence import Sequence


class KVConnector:
    """Moves KV between the blocks of an engine and other places: another engine's pool, host memory, a simulated link.
    This one moves nothing; others override what they need.

    The scheduler owns the blocks and calls the connector, and never waits for it. The connector or its owner answers
    with `Scheduler.kv_ready` when the KV that a request awaits is in its blocks, and with `Scheduler.release` when
    nothing reads the blocks of a request any more. A connector must not call these from its own methods.
    """

    def remote_tokens(self, seq: Sequence, num_cached_blocks: int) -> int:
        """Return how many of the first tokens of the new request ``seq`` get their KV from elsewhere; 0 if it computes
        all of them. If it is all of its tokens, the next token must come with the KV (see `Scheduler.kv_ready`). Its
        first ``num_cached_blocks`` blocks are in the prefix cache now."""
        return 0

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """Note that ``seq`` has the blocks of all its tokens for the first time. The first ``num_cached_blocks`` hold
        the right KV; if it has remote tokens, their KV may now be written to the other blocks.

        Returns whether its blocks are pinned, because something outside the engine reads them. Then the request is
        never preempted, and `computed` is called after its steps. Only a request that samples a single token may be
        pinned, because it never grows.
        """
        return False

    def prefix_pinned(self, attempt_id: str, block_ids: Seq[int]) -> None:
        """Note that `Scheduler.pin_prefix` has pinned these cached blocks, maybe none, until `Scheduler.release`."""

    def computed(self, seq: Sequence) -> None:
        """Note that a step computed tokens of ``seq``, whose blocks are pinned, or that KV which it awaited is there.
        Its new tokens are known."""

    def release(self, seq: Sequence) -> bool:
        """Note that ``seq`` computes nothing any more. Returns whether its blocks may be freed now; if not, they are
        held until `Scheduler.release`. The blocks of an aborted request are freed in any case."""
        return True

    def layer_hook(self, parts: Seq[ScheduledSeq], send: Callable[[Computed], None]) -> LayerHook | None:
        """A hook that calls ``send`` with the progress of ``parts`` within the step, or None if there is nothing to
        send before the step ends."""
        return None

    @property
    def num_stored_blocks(self) -> int:
        """Number of blocks that are kept outside of the pool."""
        return 0

    def evicted(self, block: int, digest: bytes) -> None:
        """Note that the prefix cache has forgotten ``block``, which holds the KV of ``digest`` until the next step."""

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        return []

    def close(self) -> None:
        """End what it runs, because the engine ends."""
