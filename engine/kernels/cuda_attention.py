"""Attention on GPUs: plans steps for Triton kernels that read pages in place, by the block tables.

Parts of one token are decodes, whose contexts are split over the GPU; longer chunks are cut into tiles of query rows.
The plan of a step is copied to the GPU at once. With CPU tensors, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from checkpoints.shape import ModelShape
from engine.kernels.cuda_flashinfer import FlashInferPrefill
from engine.kernels.cuda_paged_attention import attend_chunks, attend_decodes, tile_rows
from engine.model.attention import Attention, AttentionStep
from engine.model.kv_pool import KVPool, LayerKV
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams

NO_SLOT = -1  # slot of a row of padding: its keys and values are not written
_NO_WINDOW = 2**30
_PROGRAMS_PER_PROCESSOR = 4
_MIN_SPLITS, _MAX_SPLITS = 4, 64
_PROCESSORS_OF_INTERPRETER = 4
_CHECKED_BLOCKS, _CHECKED_ROWS = 8, 200
_CHECK_TOLERANCES = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Results are averages of numbers around 1, which such a type rounds to 1e-3 (float16) or 8e-3 (bfloat16); products of
float32 may be in TF32."""


@dataclass(frozen=True, slots=True)
class CUDAStep(AttentionStep):
    """The plan of one step, in int32 tensors on the device. Row i of the first ``contexts.shape[0]`` rows is the decode
    of sequence i."""

    slots: torch.Tensor  # ``[rows]``, ``block * block_size + offset`` of each row's token, or `NO_SLOT`
    # ``[decodes]``, tokens that a decode sees without a window, including its own; 0 for padding
    contexts: torch.Tensor
    tables: torch.Tensor  # ``[sequences, blocks]``, the block tables
    # argument of `engine.kernels.cuda_paged_attention.attend_chunks` (None: there are no chunks, or ``chunks``
    # computes them)
    tiles: torch.Tensor | None
    splits: int  # programs per decode
    arrivals: torch.Tensor  # argument of `engine.kernels.cuda_paged_attention.attend_decodes`
    softcap: float | None = None  # soft cap of the scores (None: there is none)
    # what computes the chunks, by window (`engine.kernels.cuda_flashinfer.FlashInferPrefill.plan`)
    chunks: Mapping[int | None, Any] | None = None

    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = self.contexts.shape[0]
        if decodes:
            attend_decodes(
                query[:decodes],
                layer.k,
                layer.v,
                self.tables,
                self.contexts,
                _NO_WINDOW if window is None else window,
                scale,
                self.splits,
                self.arrivals,
                out[:decodes],
                self.softcap,
            )
        if self.tiles is not None:
            attend_chunks(query, layer.k, layer.v, self.tables, self.tiles, window, scale, out, self.softcap)
        if self.chunks is not None:
            self.chunks[window].run(query[decodes:], (layer.k, layer.v), out=out[decodes:])
        return out.flatten(1)


class CUDAAttention(Attention):
    """Attention over ``pool`` for layers with any windows, with scores softly capped by ``softcap`` (None: not at all).
    ``chunks`` computes the chunks (None: our own kernel). ``batch_invariant``: our kernel for chunks computes decodes
    too. It adds up the context of a row in an order that depends on the row's position alone."""

    def __init__(
        self,
        pool: KVPool,
        softcap: float | None = None,
        chunks: FlashInferPrefill | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.softcap = softcap
        self._chunks = chunks
        self.block_size = pool.layout.block_size
        self.device = pool.tensor.device
        self._kv_heads = pool.kv_heads
        self._tile_rows = tile_rows(pool.head_dim, pool.compute_dtype, pool.tensor.device)
        self._processors = _processors(self.device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=self.device)

    def plan(self, seqs: Sequence[ScheduledSeq]) -> CUDAStep:
        decodes = 0 if self.batch_invariant else sum(len(s.token_ids) == 1 for s in seqs)
        tables = np.zeros((len(seqs), max((len(s.block_ids) for s in seqs), default=0)), dtype=np.int32)
        for table, seq in zip(tables, seqs, strict=True):
            table[: len(seq.block_ids)] = seq.block_ids
        slots = [self._slots(table, seq) for table, seq in zip(tables, seqs, strict=True)]
        contexts = np.array([s.start + 1 for s in seqs[:decodes]], dtype=np.int32)
        elsewhere = self._chunks if decodes < len(seqs) else None
        tiles = self._tiles([] if elsewhere else seqs, decodes)
        parts = self._to_device([np.concatenate(slots) if slots else contexts, contexts, tables, tiles])
        with_tiles = parts[3] if len(tiles) else None
        chunks = elsewhere.plan(seqs[decodes:]) if elsewhere else None
        splits, arrivals = self.splits(decodes), self.arrivals(decodes)
        return CUDAStep(parts[0], parts[1], parts[2], with_tiles, splits, arrivals, self.softcap, chunks)

    def arrivals(self, decodes: int) -> torch.Tensor:
        """Zeros for `CUDAStep.arrivals`. Steps share them, since they run one after the other."""
        if self._arrivals.numel() < decodes * self._kv_heads:
            self._arrivals = torch.zeros(2 * decodes * self._kv_heads, dtype=torch.int32, device=self.device)
        return self._arrivals

    def splits(self, decodes: int) -> int:
        """Number of programs that share the context of one decode, a power of 2.

        A step has enough programs to fill the device, and at least `_MIN_SPLITS` per decode, so that no single program
        processes a long context alone. There are few different numbers, because each needs a compiled kernel.
        """
        rows = 1 << max(0, decodes - 1).bit_length()
        wanted = _PROGRAMS_PER_PROCESSOR * self._processors // (rows * self._kv_heads)
        splits = _MIN_SPLITS
        while splits < min(wanted, _MAX_SPLITS):
            splits *= 2
        return splits

    def _slots(self, table: np.ndarray, seq: ScheduledSeq) -> np.ndarray:
        positions = np.arange(seq.start, seq.start + len(seq.token_ids), dtype=np.int32)
        return table[positions // self.block_size] * np.int32(self.block_size) + positions % self.block_size

    def _tiles(self, seqs: Sequence[ScheduledSeq], decodes: int) -> np.ndarray:
        tiles: list[tuple[int, int, int, int]] = []
        row = decodes
        for i, seq in enumerate(seqs[decodes:], decodes):
            rows = len(seq.token_ids)
            tiles += [
                (i, row + begin, min(self._tile_rows, rows - begin), seq.start + begin)
                for begin in range(0, rows, self._tile_rows)
            ]
            row += rows
        tiles.sort(key=lambda tile: -tile[3])  # the longest contexts first, so that no long tile starts last
        return np.array(tiles, dtype=np.int32).reshape(-1, 4)

    def _to_device(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copy the arrays to the device in one asynchronous copy."""
        sizes = [-(-array.size // 4) * 4 for array in arrays]  # each begins at a multiple of 16 bytes
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        begin = 0
        for array, size in zip(arrays, sizes, strict=True):
            host.numpy()[begin : begin + array.size] = array.ravel()
            begin += size
        # PyTorch keeps the pinned memory alive until the copy is done.
        parts = torch.split(host.to(self.device, non_blocking=True), sizes)
        return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def check_attention(pool: KVPool, shape: ModelShape, chunks: FlashInferPrefill | None) -> None:
    """Compare what computes attention here on random numbers in the first blocks of ``pool``, which are zeros after it:
    ``chunks``, our kernel for chunks, and the last row of a chunk with our kernel for decodes. `ConfigError` if two
    differ."""
    device, dtype = pool.tensor.device, pool.compute_dtype
    blocks = min(_CHECKED_BLOCKS, pool.num_blocks)
    tokens = blocks * pool.layout.block_size - 1  # the last block is not full
    rows = min(tokens, _CHECKED_ROWS)
    draw, table = torch.Generator(device).manual_seed(0), list(range(blocks))
    for numbers in (plane[:blocks] for layer in (pool.layers[0], pool.layers[-1]) for plane in (layer.k, layer.v)):
        numbers.copy_(torch.empty(numbers.shape, device=device).normal_(generator=draw))
    query = torch.empty(rows, shape.num_heads, pool.head_dim, device=device, dtype=dtype).normal_(generator=draw)
    chunk = ScheduledSeq("check", [0] * rows, tokens - rows, table, False, SamplingParams())
    decode = ScheduledSeq("check", [0], tokens - 1, table, False, SamplingParams())
    ours, theirs = (CUDAAttention(pool, shape.attention_softcap, each) for each in (None, chunks))
    for window in set(shape.layer_windows):
        for layer in (pool.layers[0], pool.layers[-1]):
            expected = ours.plan([chunk]).attend(query, layer, window, shape.attention_scale)
            last = ours.plan([decode]).attend(query[-1:], layer, window, shape.attention_scale)
            found = {"our kernels of decodes and of prompts": (last, expected[-1:])}
            if chunks is not None:
                other = theirs.plan([chunk]).attend(query, layer, window, shape.attention_scale)
                found["FlashInfer and our kernel of prompts"] = other, expected
            for what, (one, another) in found.items():
                apart = float((one.float() - another.float()).abs().max())
                if not apart < _CHECK_TOLERANCES[dtype]:  # nor if it is not a number
                    raise ConfigError(
                        f"engine.prefill_attention: {what} differ by {apart:.3g} on this GPU (window {window}), so its "
                        "tokens would be wrong; please report this"
                    )
    for block in range(blocks):
        pool.clear(block)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_OF_INTERPRETER
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
