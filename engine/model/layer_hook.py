"""Tells, within a step, that the KV of some layers is in place: so that it can travel while the others are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import LayersDone, Progress
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

    def __init__(self, layout: KVLayout, groups: int, send: Callable[[LayersDone], None]) -> None:
        self._layout, self._groups, self._send = layout, groups, send

    def hook(self, seqs: Sequence[ScheduledSeq], pushes: Sequence[Progress]) -> LayerHook | None:
        """For a step that computes ``seqs``; ``pushes`` is how far it brings those whose KV travels. None if there is
        nothing worth telling before its end."""
        if not pushes or not self._groups:
            return None
        starts = {seq.request_id: seq.start for seq in seqs}
        size = self._layout.block_size
        blocks = sum(-(-p.num_computed_tokens // size) - starts[p.request_id] // size for p in pushes)
        after = frozenset(group_ends(self._layout, self._groups, blocks))
        if not after:
            return None
        untold = list(pushes)

        def done(num_layers: int) -> None:
            self._send(LayersDone(num_layers, list(untold)))
            untold.clear()

        return LayerHook(after, done)
