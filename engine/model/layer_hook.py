"""Tells, within a step, that the KV of some layers is in place: so that it can travel while the others are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import Computed, Progress
from engine.model.layer_groups import group_ends
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerHook:
    """``done(n)`` is to be called once the first n layers' KV is in the pool, for each n of ``after``."""

    after: frozenset[int]
    done: Callable[[int], None]


class LayerReports:
    """Makes each step's hook. ``groups``: at most so many groups of layers (0: never any)."""

    def __init__(self, layout: KVLayout, groups: int, send: Callable[[Computed], None]) -> None:
        self._layout, self._groups, self._send = layout, groups, send

    def hook(self, seqs: Sequence[ScheduledSeq], pushes: Sequence[Progress]) -> LayerHook | None:
        """For a step that computes ``seqs``; ``pushes`` is how far it brings those whose KV travels. None if there is
        nothing worth telling before its end."""
        if not pushes or not self._groups:
            return None
        starts = {seq.attempt_id: seq.start for seq in seqs}
        size = self._layout.block_size
        blocks = sum(-(-p.num_computed_tokens // size) - starts[p.attempt_id] // size for p in pushes)
        after = frozenset(group_ends(self._layout, self._groups, blocks))
        if not after:
            return None
        told = False

        def done(num_layers: int) -> None:
            nonlocal told
            self._send(
                Computed(
                    [
                        Progress(p.attempt_id, p.num_computed_tokens, [] if told else p.block_ids, num_layers)
                        for p in pushes
                    ]
                )
            )
            told = True

        return LayerHook(after, done)
