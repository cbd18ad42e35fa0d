"""What is between the scheduler and KV transfer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from contract.engine import Computed, KVEvent, KVRole, Progress, Reserved
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock
from pdserve.core.handoff import FirstToken, prefix_transfer_id
from pdserve.core.kv_layout import KVLayout

WORTH_BYTES = 256 * 2**10
"""Smallest group of layers that is announced on its own: each announcement costs the engine and both workers a
message."""


class KVConnector:
    """Moves KV between the blocks of an engine and other places. This one tells a worker's KV threads which blocks of
    which requests to move, and when: it turns what the scheduler does with blocks into `KVEvent` messages, by each
    request's `KVRole`. Subclasses reach other places.

    The scheduler owns the blocks and calls the connector, and never waits for it. The connector or its owner answers
    with `Scheduler.kv_ready` when the KV that a request awaits is in its blocks, and with `Scheduler.release` when
    nothing reads the blocks of a request any more. A connector must not call these from its own methods.

    A RECEIVE request awaits the KV of its whole prompt: `Reserved` names the blocks that it goes to, and the worker
    answers with `KVReady`. The blocks of a PUSH request are pinned: `Computed` tells how much KV is in them, and the
    worker answers with `Release` when nothing reads them any more. LOCAL and PUSH requests await the KV of their first
    tokens if `Submit` says so, in the same way as RECEIVE requests.

    ``layer_groups`` is the largest number of groups of layers of ``layout`` that a step announces separately (0: it
    announces all layers at its end); each has at least `worth_bytes`.
    """

    worth_bytes = WORTH_BYTES

    def __init__(self, clock: Clock, layout: KVLayout | None = None, layer_groups: int = 0) -> None:
        self._clock = clock
        self._layout = layout
        self._layer_groups = layer_groups
        self._pushing: set[str] = set()
        self._events: list[KVEvent] = []
        self._progress: list[Progress] = []

    def remote_tokens(self, seq: Sequence, num_cached_blocks: int) -> int:
        """Return how many of the first tokens of the new request ``seq`` get their KV from elsewhere; 0 if it computes
        all of them. If it is all of its tokens, the next token must come with the KV (see `Scheduler.kv_ready`). Its
        first ``num_cached_blocks`` blocks are in the prefix cache now.

        Here: all of a RECEIVE request, whose token 1 comes with the KV; else those that another worker has cached."""
        return seq.num_prompt_tokens if seq.kv_role is KVRole.RECEIVE else seq.num_prefix_tokens

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """Note that ``seq`` has the blocks of all its tokens for the first time. The first ``num_cached_blocks`` hold
        the right KV; if it has remote tokens, their KV may now be written to the other blocks.

        Returns whether its blocks are pinned, because something outside the engine reads them. Then the request is
        never preempted, and `computed` is called after its steps. Only a request that samples a single token may be
        pinned, because it never grows.
        """
        if seq.kv_role is KVRole.RECEIVE:
            self._reserved(seq.attempt_id, seq.block_ids, num_cached_blocks)
        elif seq.num_prefix_tokens:
            self._reserved(prefix_transfer_id(seq.attempt_id), seq.block_ids, num_cached_blocks)
        if seq.kv_role is KVRole.PUSH:
            self._pushing.add(seq.attempt_id)
            if num_cached_blocks:
                found = seq.block_ids[:num_cached_blocks]
                self._progress.append(Progress(seq.attempt_id, seq.num_computed_tokens, found))
            return True
        return False

    def prefix_pinned(self, attempt_id: str, block_ids: Seq[int]) -> None:
        """Note that `Scheduler.pin_prefix` has pinned these cached blocks, maybe none, until `Scheduler.release`."""
        self._reserved(attempt_id, block_ids, len(block_ids))

    def _reserved(self, transfer_id: str, block_ids: Seq[int], num_cached_blocks: int) -> None:
        self._events.append(Reserved(transfer_id, list(block_ids), num_cached_blocks, self._clock.now()))

    def computed(self, seq: Sequence) -> None:
        """Note that a step computed tokens of ``seq``, whose blocks are pinned, or that KV which it awaited is there.
        Its new tokens are known; the first output goes with the last tokens."""
        first = None
        if seq.num_output_tokens:
            token_id = seq.token_ids[-1]
            first = FirstToken(token_id, token_id in seq.stop_token_ids)
        progress = Progress(seq.attempt_id, seq.num_computed_tokens, list(seq.block_ids), first_token=first)
        self._progress.append(progress)

    def release(self, seq: Sequence) -> bool:
        """Note that ``seq`` computes nothing any more. Returns whether its blocks may be freed now; if not, they are
        held until `Scheduler.release`. The blocks of an aborted request are freed in any case."""
        self._pushing.discard(seq.attempt_id)
        return not seq.pinned

    def layer_hook(self, parts: Seq[ScheduledSeq], send: Callable[[Computed], None]) -> LayerHook | None:
        """A hook that calls ``send`` with the progress of ``parts`` within the step, or None if there is nothing to
        send before the step ends."""
        if self._layout is None or not self._layer_groups or not self._pushing:
            return None
        pushed = [part for part in parts if part.attempt_id in self._pushing]
        size = self._layout.block_size
        blocks = sum(-(-part.end // size) - part.start // size for part in pushed)
        after = frozenset(group_ends(self._layout, self._layer_groups, blocks, self.worth_bytes))
        if not after:
            return None
        told = False

        def done(num_layers: int) -> None:
            nonlocal told
            send(
                Computed([Progress(p.attempt_id, p.end, [] if told else list(p.block_ids), num_layers) for p in pushed])
            )
            told = True

        return LayerHook(after, done)

    @property
    def num_stored_blocks(self) -> int:
        """Number of blocks that are kept outside of the pool."""
        return 0

    def evicted(self, block: int, digest: bytes) -> None:
        """Note that the prefix cache has forgotten ``block``, which holds the KV of ``digest`` until the next step."""

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        if self._progress:
            events.append(Computed(self._progress))
            self._progress = []
        return events

    def close(self) -> None:
        """End what it runs, because the engine ends."""


def group_ends(layout: KVLayout, most_groups: int, num_blocks: int, worth_bytes: int = WORTH_BYTES) -> tuple[int, ...]:
    """The numbers of layers after which a step that writes ``num_blocks`` blocks announces progress.

    The last layer is not included, so the result is empty if there is only one group.
    """
    groups = min(most_groups, layout.num_layers, num_blocks * layout.block_bytes // worth_bytes)
    return tuple(sorted({layout.num_layers * group // groups for group in range(1, groups)}))
