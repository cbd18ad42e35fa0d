"""Attention on CPUs whose results do not depend on the batch, for `engine.batch_invariant`.

The tokens of a sequence are cut into strips of `STRIP_ROWS` positions, counted from its beginning. A strip is always
computed as a whole, over all columns that its last position may see; rows that a step does not have are zeros. So the
shapes of the products, and the place of a row in them, depend on the row's position alone: not on the other requests,
and not on whether the row is a decode or belongs to a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.cpu_attention import CPUAttention
from engine.model.attention import AttentionStep
from engine.model.kv_pool import LayerKV
from engine.scheduling.batch import ScheduledSeq

STRIP_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Strip:
    """Rows ``begin`` to ``end`` of the step are those from ``offset`` on of a strip."""

    begin: int
    end: int
    offset: int
    pages: torch.Tensor  # [2 * kv_heads * blocks]
    hidden: torch.Tensor  # [STRIP_ROWS, columns]: 0 or -inf


class InvariantCPUAttention(CPUAttention):
    """As `CPUAttention`, at a higher price: a decode costs as much as a strip."""

    def plan(self, seqs: Sequence[ScheduledSeq]) -> AttentionStep:
        self.clear_unfilled(seqs)
        plans: dict[int | None, list[_Strip]] = {window: [] for window in self.windows}
        for window, strips in plans.items():
            row = 0
            for seq in seqs:
                strips += self._strips_of(seq, row, window)
                row += len(seq.token_ids)
        return _InvariantStep(self, self.slots(seqs), plans)

    def _strips_of(self, seq: ScheduledSeq, row: int, window: int | None) -> list[_Strip]:
        size, strips = self.block_size, list[_Strip]()
        table = list(seq.block_ids[: -(-seq.end // size)])
        position = seq.start
        while position < seq.end:
            first = position // STRIP_ROWS * STRIP_ROWS
            end = min(first + STRIP_ROWS, seq.end)
            first_block = 0 if window is None else max(0, first + 1 - window) // size
            blocks = -(-(first + STRIP_ROWS) // size)
            # Blocks that are not there yet are replaced by one that is, which the mask hides.
            mine = (table + table[:1] * (blocks - len(table)))[first_block:blocks]
            columns = torch.arange(first_block * size, blocks * size)
            positions = torch.arange(first, first + STRIP_ROWS)[:, None]
            hidden = columns > positions
            if window is not None:
                hidden |= columns <= positions - window
            begin = row + position - seq.start
            pages, hide = self.pages([mine]), self.hide(hidden)
            strips.append(_Strip(begin, begin + end - position, position - first, pages, hide))
            position = end
        return strips

    def strip(self, query: torch.Tensor, layer: LayerKV, strip: _Strip, scale: float, out: torch.Tensor) -> None:
        """Compute the rows of ``strip`` into ``out``."""
        keys, values = self.fetch(layer, strip.pages, 1)
        kv_heads, columns, head_dim = keys.shape
        group, rows = self.num_heads // kv_heads, slice(strip.offset, strip.offset + strip.end - strip.begin)
        folded = torch.zeros(kv_heads, group, STRIP_ROWS, head_dim, dtype=query.dtype)
        split = (-1, kv_heads, group, head_dim)
        folded[:, :, rows] = query[strip.begin : strip.end].view(split).permute(1, 2, 0, 3)
        scores = self.scores(folded.view(kv_heads, -1, head_dim), keys, scale)
        scores.view(-1, STRIP_ROWS, columns).add_(strip.hidden)
        torch.softmax(scores, -1, out=scores)
        attended = torch.bmm(scores, values).view(folded.shape)[:, :, rows]
        out[strip.begin : strip.end].view(split).copy_(attended.permute(2, 0, 1, 3))


@dataclass(frozen=True, slots=True)
class _InvariantStep(AttentionStep):
    attention: InvariantCPUAttention
    slots: torch.Tensor
    plans: dict[int | None, list[_Strip]]  # by window

    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        for strip in self.plans[window]:
            self.attention.strip(query, layer, strip, scale, out)
        return out.flatten(1)
