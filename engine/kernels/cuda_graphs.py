"""Decode steps as CUDA graphs: one launch for the whole model, for a fixed set of rows.

A row is a token of a request, or a draft after it: a draft is computed like a request of its own with the same block
table, since each layer writes the keys and values of all rows before any row reads them.

A graph has a fixed size and reads its inputs from fixed addresses. The inputs of a step are copied there and padded to
the next size. Rows of padding have no slot and no context, so they read and write no block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.kernels.cuda_attention import NO_SLOT, CUDAAttention, CUDAStep
from engine.model.decoder import Decoder, ModelStep
from engine.model.kv_pool import KVPool
from engine.model.runner import LastTokens
from engine.scheduling.batch import PENDING, ScheduledSeq
from runtime.cuda import Cuda, Graph, upload

log = logging.getLogger(__name__)

_ROWS = 64  # of block tables; doubled when more requests are in a step
_HEADER = 5  # rows of the inputs before the block tables: token ids, positions, slots, contexts, rows of last tokens


def ladder(max_seqs: int) -> list[int]:
    """The batch sizes of the graphs, up to and including ``max_seqs``. Their distance grows with the size, for little
    padding and few graphs."""
    rungs = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32), *range(256, max_seqs, 64)]
    return [n for n in rungs if n < max_seqs] + [max_seqs]


class BlockTables:
    """The block tables of requests, of up to ``max_blocks`` blocks, as rows of an array that is kept from step to step:
    a step writes only what is new."""

    def __init__(self, max_blocks: int) -> None:
        self._array = np.zeros((_ROWS, max_blocks), dtype=np.int32)
        self._free = list(range(_ROWS))
        self._rows: dict[str, tuple[int, Sequence[int]]] = {}  # row and table, by attempt id
        self._lengths = [0] * _ROWS

    def of(self, seqs: Sequence[ScheduledSeq], blocks: int) -> np.ndarray:
        """A copy of the first ``blocks`` entries of the tables of ``seqs``: ``[len(seqs), blocks]``, int32. What
        follows a shorter table is 0."""
        rows: list[int] = []
        for seq in seqs:
            row, known = self._rows.get(seq.attempt_id, (-1, ()))
            block_ids = seq.block_ids
            if known is not block_ids:  # a table only grows; a request that was preempted gets another one
                row = self._restart(row, seqs)
                self._rows[seq.attempt_id] = row, block_ids
            if self._lengths[row] < len(block_ids):
                self._array[row, self._lengths[row] : len(block_ids)] = block_ids[self._lengths[row] :]
                self._lengths[row] = len(block_ids)
            rows.append(row)
        tables: np.ndarray = self._array[:, :blocks][rows]
        return tables

    def _restart(self, row: int, seqs: Sequence[ScheduledSeq]) -> int:
        """An empty row: ``row``, or if that is -1, one that no request of the step ``seqs`` has."""
        if row < 0:
            if not self._free:
                present = {seq.attempt_id for seq in seqs}
                for attempt_id in self._rows.keys() - present:
                    self._free.append(self._rows.pop(attempt_id)[0])
            if not self._free:
                self._free += range(len(self._array), 2 * len(self._array))
                self._lengths += [0] * len(self._array)
                self._array = np.concatenate((self._array, np.zeros_like(self._array)))
            row = self._free.pop()
        self._lengths[row] = 0
        self._array[row] = 0
        return row


class DecodeGraphs:
    """Steps that only decode, of up to ``max_seqs`` rows with block tables of up to ``max_blocks`` blocks.

    All sizes share one int32 array for their inputs. For size n it is ``[5 + max_blocks, n]``: token ids, positions,
    slots, contexts, the row of the last step that sampled the token (-1: the id is known), then the block tables, with
    one row of the step per column. So the inputs of a step are contiguous, and one copy of the length of the longest
    context brings them to the GPU. Without `capture`, the same step runs launch by launch.
    """

    def __init__(self, model: Decoder, attention: CUDAAttention, pool: KVPool, max_seqs: int, max_blocks: int) -> None:
        self.sizes = ladder(max_seqs)
        self._model = model
        self._attention = attention
        self._tables = BlockTables(max_blocks)
        self._pool = pool
        self._max_blocks = max_blocks
        self._device = pool.tensor.device
        self._inputs = torch.zeros((_HEADER + max_blocks) * max_seqs, dtype=torch.int32, device=self._device)
        self._last = torch.zeros(max_seqs, dtype=torch.int32, device=self._device)  # tokens of the last step, by row
        self._steps = {size: self._step(size) for size in self.sizes}
        self._graphs: dict[int, Graph] = {}
        self._logits: torch.Tensor | None = None  # [max_seqs, vocabulary]: the results of all graphs

    def fits(self, seqs: Sequence[ScheduledSeq]) -> bool:
        """Whether `logits` can run this step: it has only decodes, and all of them sample."""
        most = self._max_blocks * self._attention.block_size
        return 0 < sum(len(s.token_ids) for s in seqs) <= self.sizes[-1] and all(
            s.decodes and s.sample and s.end <= most for s in seqs
        )

    @torch.inference_mode()
    def logits(self, seqs: Sequence[ScheduledSeq], before: LastTokens) -> torch.Tensor:
        """Compute ``seqs`` and write their keys and values to the pool. Returns logits ``[rows, vocabulary]``, which
        the next step overwrites. `PENDING` tokens are those of ``before``."""
        rows = sum(len(seq.token_ids) for seq in seqs)
        size = next(size for size in self.sizes if size >= rows)
        last_rows, last_ids = before.rows, before.token_ids
        if pending := [seq.attempt_id for seq in seqs if seq.token_ids[0] == PENDING]:
            if last_ids.shape[0] > self._last.shape[0]:  # it had more rows, those of drafts
                last_ids = last_ids[upload([last_rows[each] for each in pending], torch.int64, self._device)]
                last_rows = {each: row for row, each in enumerate(pending)}
            self._last[: last_ids.shape[0]].copy_(last_ids)
        self._load(seqs, size, last_rows)
        if self._logits is None or size not in self._graphs:
            return self._compute(size)[:rows]
        self._graphs[size].replay()
        return self._logits[:rows]

    @torch.inference_mode()
    def capture(self, cuda: Cuda, index: int) -> None:
        """Record the graph of every size on GPU ``index``, with padding only, so that the KV pool does not change. All
        graphs share the memory of the largest, which is recorded first."""
        started_s = time.monotonic()
        free_bytes = cuda.memory(index).free
        largest: Graph | None = None
        for size in reversed(self.sizes):
            self._load([], size, {})
            self._graphs[size] = cuda.record_graph(partial(self._keep_logits, size), index, largest)
            largest = largest or self._graphs[size]
            log.info("CUDA graph of %d sequences after %.1f s", size, time.monotonic() - started_s)
        taken_mib = (free_bytes - cuda.memory(index).free) / 2**20
        log.info("%d CUDA graphs in %.1f s, %.0f MiB", len(self.sizes), time.monotonic() - started_s, taken_mib)

    def _step(self, size: int) -> ModelStep:
        """The step over the inputs of ``size``, which it reads when it runs."""
        inputs = self._inputs[: (_HEADER + self._max_blocks) * size].view(-1, size)
        token_ids, positions, slots, contexts = inputs[: _HEADER - 1].unbind()
        tables = inputs[_HEADER:].t()
        splits, arrivals = self._attention.splits(size), self._attention.arrivals(self.sizes[-1])
        attention = CUDAStep(slots, contexts, tables, None, splits, arrivals, self._attention.softcap)
        return ModelStep(token_ids=token_ids, positions=positions, attention=attention)

    def _compute(self, size: int) -> torch.Tensor:
        step = self._steps[size]
        rows = self._inputs[(_HEADER - 1) * size : _HEADER * size]
        token_ids = torch.where(rows < 0, step.token_ids, self._last.index_select(0, rows.clamp_min(0)))
        step = replace(step, token_ids=token_ids)
        if self._attention.batch_invariant:
            assert isinstance(step.attention, CUDAStep)
            step = replace(step, attention=replace(step.attention, contexts=rows[:0], tiles=self._tiles(size)))
        return self._model.logits(self._model.forward(step, self._pool))

    def _tiles(self, size: int) -> torch.Tensor:
        """The decodes as tiles of one row each, or of none for padding."""
        positions, contexts = (self._inputs[i * size : (i + 1) * size] for i in (1, 3))
        numbers = torch.arange(size, dtype=torch.int32, device=self._device)
        return torch.stack((numbers, numbers, contexts.clamp_max(1), positions), dim=1)

    def _keep_logits(self, size: int) -> None:
        logits = self._compute(size)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[:size].copy_(logits)

    def _load(self, seqs: Sequence[ScheduledSeq], size: int, last_rows: Mapping[str, int]) -> None:
        """Copy ``seqs`` and padding to the inputs of ``size``. ``last_rows`` are the rows of `PENDING` tokens."""
        block_size = self._attention.block_size
        blocks = max(((s.end - 1) // block_size + 1 for s in seqs), default=0)
        lengths = [len(seq.token_ids) for seq in seqs]
        used = sum(lengths)
        pinned = self._device.type == "cuda"
        host = torch.empty((_HEADER + blocks, size), dtype=torch.int32, pin_memory=pinned)
        inputs: np.ndarray = host.numpy()
        inputs[:, used:] = 0
        inputs[2, used:] = NO_SLOT
        inputs[_HEADER - 1, used:] = -1
        tables = self._tables.of(seqs, blocks)
        if used > len(seqs):
            tables = np.repeat(tables, lengths, axis=0)
        positions = np.array([place for seq in seqs for place in range(seq.start, seq.end)], dtype=np.int32)
        inputs[0, :used] = [token_id for seq in seqs for token_id in seq.token_ids]
        inputs[1, :used] = positions
        inputs[2, :used] = tables[np.arange(used), positions // block_size] * block_size + positions % block_size
        inputs[3, :used] = positions + 1
        inputs[4, :used] = [
            last_rows[seq.attempt_id] if token_id == PENDING else -1 for seq in seqs for token_id in seq.token_ids
        ]
        inputs[_HEADER:, :used] = tables.T
        # PyTorch keeps the pinned memory alive until the copy is done.
        self._inputs[: host.numel()].copy_(host.view(-1), non_blocking=True)
