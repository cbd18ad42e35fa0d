"""The limits and options of one engine's scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from engine.scheduling.token_budget import ChunkTokens
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one engine. ``max_num_batched_tokens`` and ``max_num_seqs`` bound a step, ``max_model_len`` bounds
    prompt plus output of a request, ``num_blocks`` blocks of ``block_size`` tokens are the pool. All at least 1
    (`ConfigError`). ``eos_token_ids`` end every request that does not ignore them. With ``prefix_caching``, requests of
    the same salt share the blocks of equal beginnings. ``batching``: requests join the running batch whenever there is
    room (continuous), or a batch is admitted only when nothing runs (static). ``chunk_tokens`` bounds what a step
    computes of one prompt; with ``off``, a prompt beyond the step's budget gets a step of its own."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: Collection[int] = ()
    prefix_caching: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    chunk_tokens: ChunkTokens = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}: must be at least 1, got {getattr(self, name)}")
        if self.batching not in ("continuous", "static"):
            raise ConfigError(f"engine.batching: must be continuous or static, got {self.batching!r}")
        if self.chunk_tokens is not None and self.chunk_tokens != "off" and self.chunk_tokens < 1:
            raise ConfigError(f"engine.chunk_tokens: must be 'off' or at least 1, got {self.chunk_tokens}")
