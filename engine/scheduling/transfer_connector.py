"""The connector of a worker's engine: its KV threads move the bytes, the engine tells them which and when."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.messages import Computed, KVEvent, KVRole, Progress, Reserved
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.sequence import Sequence
from pdserve.core.clock import Clock
from pdserve.core.handoff import FirstToken
from pdserve.core.kv_layout import KVLayout

WORTH_BYTES = 256 * 2**10
"""Groups of layers smaller than this do not travel on their own: each costs the engine and both workers a message."""


class TransferConnector:
    """KV between the pools of two workers, by each request's `KVRole`.

    RECEIVE requests await the KV of their whole prompt: `Reserved` tells where it goes, and the worker answers with
    `KVReady`. PUSH requests have their blocks pinned: `Computed` tells how far they are, and the worker answers with
    `Release`, once the blocks have been received or are of no use any more. LOCAL requests are none of its business.

    With ``layer_groups``, steps tell of groups of layers of ``layout`` as they are computed, in at most so many groups.
    """

    def __init__(self, clock: Clock, layout: KVLayout | None = None, layer_groups: int = 0) -> None:
        self._clock = clock
        self._layout = layout
        self._layer_groups = layer_groups
        self._pushing: set[str] = set()
        self._events: list[KVEvent] = []
        self._progress: list[Progress] = []

    def remote_tokens(self, seq: Sequence) -> int:
        """The whole prompt of a RECEIVE request; token 1 comes with its KV."""
        return seq.num_prompt_tokens if seq.kv_role is KVRole.RECEIVE else 0

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> bool:
        """Reserve for RECEIVE, pin for PUSH; what a PUSH request found in the cache is told at once."""
        if seq.kv_role is KVRole.RECEIVE:
            now_s = self._clock.now()
            self._events.append(Reserved(seq.attempt_id, list(seq.block_ids), num_cached_blocks, now_s))
        elif seq.kv_role is KVRole.PUSH:
            self._pushing.add(seq.attempt_id)
            if num_cached_blocks:
                found = seq.block_ids[:num_cached_blocks]
                self._progress.append(Progress(seq.attempt_id, seq.num_computed_tokens, found))
            return True
        return False

    def computed(self, seq: Sequence) -> None:
        """Tell how far a PUSH request is, with the last of its tokens its first output."""
        first = None
        if seq.num_output_tokens:
            token_id = seq.token_ids[-1]
            first = FirstToken(token_id, token_id in seq.stop_token_ids)
        progress = Progress(seq.attempt_id, seq.num_computed_tokens, list(seq.block_ids), first_token=first)
        self._progress.append(progress)

    def release(self, seq: Sequence) -> bool:
        """Hold the blocks of a PUSH request unless they have been released already."""
        self._pushing.discard(seq.attempt_id)
        return not seq.pinned

    def layer_hook(self, parts: Seq[ScheduledSeq], send: Callable[[Computed], None]) -> LayerHook | None:
        """A hook that sends groups of layers of the PUSH requests among ``parts``; None if there is nothing worth
        telling before the step's end."""
        if self._layout is None or not self._layer_groups or not self._pushing:
            return None
        pushed = [part for part in parts if part.attempt_id in self._pushing]
        size = self._layout.block_size
        blocks = sum(-(-part.end // size) - part.start // size for part in pushed)
        after = frozenset(group_ends(self._layout, self._layer_groups, blocks))
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

    def take_events(self) -> list[KVEvent]:
        """`Reserved` and `Computed` since the last call."""
        events, self._events = self._events, []
        if self._progress:
            events.append(Computed(self._progress))
            self._progress = []
        return events


def group_ends(layout: KVLayout, most_groups: int, num_blocks: int) -> tuple[int, ...]:
    """The numbers of layers after which a step that touches ``num_blocks`` blocks tells of them, its last layer left
    out: empty if there is only one group."""
    groups = min(most_groups, layout.num_layers, num_blocks * layout.block_bytes // WORTH_BYTES)
    return tuple(sorted({layout.num_layers * group // groups for group in range(1, groups)}))
