"""Attention over the paged KV pool, as a device does it: a step is planned once, and the plan then serves every layer.

This is the seam for native kernels: whatever implements `Attention` and `AttentionStep` can take the place of
`engine.kernels.cpu_attention` or `engine.kernels.cuda_attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from engine.model.kv_pool import LayerKV
from engine.scheduling.batch import ScheduledSeq


class AttentionStep(ABC):
    """Where the rows of one step keep their keys and values, and what each attends to."""

    @abstractmethod
    def write(self, keys_values: torch.Tensor, layer: LayerKV) -> None:
        """Put ``keys_values`` (``[rows, 2 * kv_heads, head_dim]``: keys, then values) into the pool."""

    @abstractmethod
    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float) -> torch.Tensor:
        """What ``query`` (``[rows, heads, head_dim]``) makes of the pool, ``[rows, heads * head_dim]``. Each row sees
        itself and what came before it, with a window of w only the last w of these. Scores are multiplied by
        ``scale`` (1 if the queries come scaled)."""


class Attention(ABC):
    """Attention of one device over its pool."""

    @abstractmethod
    def prepare(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Do to the pool what has to be done before ``seqs`` write to it."""

    @abstractmethod
    def order(self, seqs: Sequence[ScheduledSeq]) -> list[ScheduledSeq]:
        """``seqs`` in the order in which `plan` wants their rows."""

    @abstractmethod
    def plan(self, seqs: Sequence[ScheduledSeq]) -> AttentionStep:
        """The plan for rows laid out as ``seqs`` in `order`. It is good until the next step is planned."""
