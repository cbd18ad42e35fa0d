"""Runs a step on the device: parts of requests in, sampled tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from devices.cuda import Cuda, Event
from engine.model.attention import Attention
from engine.model.decoder import LlamaDecoder, ModelStep
from engine.model.kv_pool import KVPool
from engine.model.sampler import sample
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from pdserve.core.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_WARMUP_TOKENS = 128


class _ComputedLayers:
    """Calls ``done`` when a GPU has computed a group of layers, which is long after their launch. It waits for a group
    after the next group has been launched, so that the GPU always has work."""

    def __init__(self, done: Callable[[int], None], cuda: Cuda, index: int) -> None:
        self._done, self._cuda, self._index = done, cuda, index
        self._launched: deque[tuple[int, Event]] = deque()

    def __call__(self, num_layers: int) -> None:
        """Note that the first ``num_layers`` layers have been launched."""
        self._launched.append((num_layers, self._cuda.record(self._index)))
        if len(self._launched) > 1:
            before, event = self._launched.popleft()
            event.synchronize()
            self._done(before)


class RecordedSteps(Protocol):
    """Recorded steps that can be replayed (`engine.kernels.cuda_graphs.DecodeGraphs`)."""

    def fits(self, seqs: Sequence[ScheduledSeq]) -> bool:
        """Whether there is a recorded step for ``seqs``."""
        ...

    def logits(self, seqs: Sequence[ScheduledSeq]) -> torch.Tensor:
        """Replay the step; logits ``[len(seqs), vocabulary]``."""
        ...


class ModelRunner:
    """Combines model, attention, pool and sampler. Keeps no state of requests. ``graphs`` run the steps that fit.
    ``cuda`` is the GPU of the pool (None: the pool is on the host)."""

    def __init__(
        self,
        model: LlamaDecoder,
        attention: Attention,
        pool: KVPool,
        graphs: RecordedSteps | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        self._cuda = cuda
        self._graphs = graphs
        self._model = model
        self._attention = attention
        self._pool = self.pool = pool
        self._device = pool.tensor.device

    @torch.inference_mode()
    def execute(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None = None) -> dict[str, list[SampledToken]]:
        """Compute ``seqs`` in one pass and write their keys and values to the pool.

        Returns the tokens of each request that gets any (always one), by request id. ``hook`` is called when the keys
        and values of a group of layers can be read; a step that runs as a recorded graph does not call it. ValueError
        for a part with drafts.
        """
        self._attention.prepare(seqs)
        wanted = ordered = self._attention.order(seqs)
        if self._graphs is not None and self._graphs.fits(ordered):
            logits = self._graphs.logits(ordered)
        else:
            step, wanted = self._step(ordered)
            if hook is not None and self._cuda is not None:
                hook = LayerHook(hook.after, _ComputedLayers(hook.done, self._cuda, self._device.index or 0))
            hidden = self._model.forward(step, self._pool, hook)
            if not wanted:
                if self._cuda is not None:
                    self._cuda.synchronize(self._device.index or 0)  # after the step its blocks may be read
                return {}
            logits = self._model.logits(hidden)
        positions = [s.end for s in wanted]
        drawn = sample(logits, [s.params for s in wanted], positions, [s.history for s in wanted])
        return {seq.attempt_id: [token] for seq, token in zip(wanted, drawn, strict=True)}

    def _step(self, seqs: Sequence[ScheduledSeq]) -> tuple[ModelStep, list[ScheduledSeq]]:
        """The pass over ``seqs``, and the parts that get a token, in the order of its hidden states."""
        step = ModelStep(
            token_ids=torch.tensor([t for s in seqs for t in s.token_ids], device=self._device),
            positions=torch.tensor([p for s in seqs for p in range(s.start, s.end)], device=self._device),
            attention=self._attention.plan(seqs),
        )
        if all(len(s.token_ids) == 1 and s.sample for s in seqs):
            return step, list(seqs)
        # Only the last row of a chunk is wanted, and it attends like a decode in the last layer.
        rows: dict[str, int] = {}
        lasts: dict[str, ScheduledSeq] = {}
        wanted: dict[str, ScheduledSeq] = {}
        end = 0
        for seq in seqs:
            end += len(seq.token_ids)
            if seq.sample:
                if seq.num_drafts:
                    raise ValueError(f"{seq.attempt_id}: this runner verifies no draft tokens")
                rows[seq.attempt_id] = end - 1
                wanted[seq.attempt_id] = seq
                lasts[seq.attempt_id] = replace(seq, token_ids=seq.token_ids[-1:], start=seq.end - 1)
        ordered = self._attention.order(list(lasts.values()))
        step = replace(
            step,
            wanted=torch.tensor([rows[s.attempt_id] for s in ordered], dtype=torch.int64, device=self._device),
            wanted_attention=self._attention.plan(ordered),
        )
        return step, [wanted[s.attempt_id] for s in ordered]

    def warmup(self, max_tokens: int) -> None:
        """Run a prompt chunk and a decode once, so that no request waits for lazy initialisation. Overwrites the first
        blocks of the pool."""
        layout = self._pool.layout
        tokens = min(_WARMUP_TOKENS, max_tokens, self._pool.num_blocks * layout.block_size)
        blocks = list(range(layout.blocks_for(tokens)))
        self.execute([ScheduledSeq("warmup", [0] * tokens, 0, blocks, True, _GREEDY)])
        self.execute([ScheduledSeq("warmup", [0], tokens - 1, blocks, True, _GREEDY)])
