"""Runs one step on the device: `{request: tokens to compute}` in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import attention_metadata, step_order
from engine.batch import SampledToken, SamplerParams, ScheduledSeq
from engine.kv_pool import KVPool
from engine.model import LlamaDecoder
from engine.sampler import sample

_GREEDY = SamplerParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_WARMUP_TOKENS = 128


class ModelRunner:
    """Joins model, pool and sampler; holds no state of requests."""

    def __init__(self, model: LlamaDecoder, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._device = pool.tensor.device

    @torch.inference_mode()
    def execute(self, seqs: Sequence[ScheduledSeq]) -> dict[str, list[SampledToken]]:
        """Compute ``seqs`` in one pass, their keys and values into the pool; the tokens drawn (here exactly one) for
        each request that wants any, by request id."""
        block_size = self._pool.layout.block_size
        ordered = step_order(seqs, block_size)
        meta = attention_metadata(ordered, block_size, self._pool.tensor.dtype, self._device)
        token_ids = torch.tensor([t for s in ordered for t in s.token_ids], device=self._device)
        positions = torch.tensor([p for s in ordered for p in _positions(s)], device=self._device)
        hidden = self._model.forward(token_ids, positions, self._pool, meta)
        wanted: list[ScheduledSeq] = []
        rows: list[int] = []
        end = 0
        for seq in ordered:
            end += len(seq.token_ids)
            if seq.sample:
                wanted.append(seq)
                rows.append(end - 1)
        if not wanted:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the step's end tells others that its blocks may be read
            return {}
        logits = self._model.logits(hidden[torch.tensor(rows, device=self._device)])
        positions_drawn = [s.start + len(s.token_ids) for s in wanted]
        drawn = sample(logits, [s.params for s in wanted], positions_drawn, [s.history for s in wanted])
        return {seq.request_id: [token] for seq, token in zip(wanted, drawn, strict=True)}

    def warmup(self, max_tokens: int) -> None:
        """Run a prompt chunk and a decode once, so that the first request pays for no lazy initialisation. Writes into
        the first blocks of the pool, which nobody owns yet."""
        layout = self._pool.layout
        tokens = min(_WARMUP_TOKENS, max_tokens, self._pool.num_blocks * layout.block_size)
        blocks = list(range(layout.blocks_for(tokens)))
        self.execute([ScheduledSeq("warmup", [0] * tokens, 0, blocks, True, _GREEDY)])
        self.execute([ScheduledSeq("warmup", [0], tokens - 1, blocks, True, _GREEDY)])


def _positions(seq: ScheduledSeq) -> range:
    return range(seq.start, seq.start + len(seq.token_ids))
