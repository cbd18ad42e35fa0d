"""Attention over the paged KV pool: a step is planned once, and the plan serves every layer.

`engine.kernels.cpu_attention` and `engine.kernels.cuda_attention` implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from engine.model.kv_pool import LayerKV
from engine.scheduling.batch import ScheduledSeq


class AttentionStep(ABC):
    """The plan of one step: where each row's keys and values go, and what the row attends to.

    ``slots`` are the places in the pool that the device's decoder layer writes keys and values to.
    """

    slots: torch.Tensor

    @abstractmethod
    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float) -> torch.Tensor:
        """Attention of ``query`` (``[rows, heads, head_dim]``) over the pool: ``[rows, heads * head_dim]``.

        Each row sees itself and the tokens before it, or only the last ``window`` of these. Scores are multiplied by
        ``scale`` (1 if the queries are scaled already), and then capped softly if the `Attention` has a soft cap.
        """


class Attention(ABC):
    """Attention of one device over its pool."""

    @staticmethod
    def order(seqs: Sequence[ScheduledSeq]) -> list[ScheduledSeq]:
        """Return ``seqs`` in the order that `plan` requires: decodes, by the number of their drafts, then by context,
        and then chunks."""
        return sorted(seqs, key=lambda s: (len(s.token_ids) > s.num_drafts + 1, s.num_drafts, s.start))

    @abstractmethod
    def plan(self, seqs: Sequence[ScheduledSeq]) -> AttentionStep:
        """Plan a step of ``seqs``, which are in `order`, and prepare the pool for what they write. The step before it
        has been launched."""
