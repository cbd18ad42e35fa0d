"""Attention by tiles against attention written out, over contexts and batches that take several tiles and strips."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.kernels import cpu_attention
from engine.kernels.cpu_attention import CPUAttention
from engine.model.kv_pool import KVPool
from engine.scheduling.batch import ScheduledSeq
from pdserve.core.kv_layout import KVLayout
from tests.engine.harness import GREEDY, make_pool

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 16, 3
LAYER = 1
SCALE = HEAD_DIM**-0.5


def _pool(num_blocks: int, block_size: int, dtype: str = "float32") -> KVPool:
    pool = make_pool(KVLayout.uniform("m", dtype, block_size, LAYERS, KV_HEADS, HEAD_DIM), num_blocks)
    pool.tensor.normal_()
    return pool


def _seqs(lengths: Sequence[tuple[int, int]], block_size: int, all_drafts: bool = False) -> list[ScheduledSeq]:
    """Sequences of ``(start, rows)``, in scattered blocks. With ``all_drafts`` those of few rows are decodes, with
    drafts."""
    counts = [-(-(start + rows) // block_size) for start, rows in lengths]
    free = list(range(sum(counts)))
    random.Random(3).shuffle(free)
    return [
        ScheduledSeq(
            str(i),
            [0] * rows,
            start,
            [free.pop() for _ in range(count)],
            True,
            GREEDY,
            num_drafts=rows - 1 if all_drafts and rows <= 9 else 0,
        )
        for i, ((start, rows), count) in enumerate(zip(lengths, counts, strict=True))
    ]


def _written_out(
    query: torch.Tensor, pool: KVPool, seqs: Sequence[ScheduledSeq], window: int | None, softcap: float | None = None
) -> torch.Tensor:
    out: list[torch.Tensor] = []
    layer, row = pool.layers[LAYER], 0
    for seq in seqs:
        context = seq.start + len(seq.token_ids)
        keys, values = (
            torch.cat([part[b] for b in seq.block_ids], dim=1)[:, :context].repeat_interleave(HEADS // KV_HEADS, dim=0)
            for part in (layer.k, layer.v)
        )
        for position in range(seq.start, context):
            first = 0 if window is None else max(0, position + 1 - window)
            scores = torch.einsum("hd,hkd->hk", query[row], keys[:, first : position + 1]) * SCALE
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), values[:, first : position + 1]).flatten())
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 300)],  # several strips
        [(5, 130), (0, 2), (77, 64)],
        [(1100, 200)],
        [(3, 1), (200, 1), (64, 1), (63, 1), (0, 1), (500, 1)],
        [(3, 1), (90, 1), (31, 33), (0, 40), (9, 1)],
        [(3, 2), (200, 9), (64, 9), (63, 1), (14, 4), (500, 9), (0, 40), (70, 1), (95, 2)],
    ],
    ids=str,
)
@pytest.mark.parametrize("all_drafts", [False, True])
def test_what_attention_is(
    lengths: list[tuple[int, int]], fused: bool, window: int | None, all_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    block_size = 16
    page_bytes = block_size * HEAD_DIM * 4
    monkeypatch.setattr(cpu_attention, "TILE_BYTES", 40 * 2 * KV_HEADS * page_bytes)  # decodes take several tiles
    unordered = _seqs(lengths, block_size, all_drafts)
    pool = _pool(sum(len(s.block_ids) for s in unordered), block_size)
    attention = CPUAttention(pool, HEADS, {None, window}, fused=fused)
    seqs = attention.order(unordered)
    step = attention.plan(seqs)
    rows = sum(len(s.token_ids) for s in seqs)
    before = pool.tensor.clone()
    keys_values = torch.randn(rows, 2 * KV_HEADS, HEAD_DIM)
    pool.layers[LAYER].vectors.index_copy_(0, step.slots, keys_values.view(-1, HEAD_DIM))
    row = 0
    for seq in seqs:
        for position in range(seq.start, seq.start + len(seq.token_ids)):
            slot = (seq.block_ids[position // block_size], LAYER, slice(None), slice(None), position % block_size)
            assert torch.equal(pool.tensor[slot].flatten(0, 1), keys_values[row])
            before[slot] = keys_values[row].view(2, KV_HEADS, HEAD_DIM)
            row += 1
    assert torch.equal(pool.tensor, before)  # and nothing else was written
    query = torch.randn(rows, HEADS + 3, HEAD_DIM)[:, :HEADS]  # a view, as in the model
    out = step.attend(query, pool.layers[LAYER], window, SCALE)
    torch.testing.assert_close(out, _written_out(query, pool, seqs, window), rtol=1e-4, atol=1e-4)


class Attended:
    """What becomes of random queries over a random pool, and what should."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        *,
        dtype: str = "float32",
        window: int | None = None,
        scaled: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        unordered = _seqs(lengths, 16, all_drafts=True)
        pool = _pool(sum(len(s.block_ids) for s in unordered), 16, dtype)
        self.attention = CPUAttention(pool, HEADS, {window}, **options)
        seqs = self.attention.order(unordered)
        query = torch.randn(sum(rows for _, rows in lengths), HEADS, HEAD_DIM).to(pool.tensor.dtype)
        plan, factor = self.attention.plan(seqs), SCALE if scaled else 1.0
        self.out = plan.attend(query * factor, pool.layers[LAYER], window, SCALE / factor)
        exact = _pool(pool.num_blocks, 16)
        exact.tensor.copy_(pool.tensor)
        self.expected = _written_out(query.float(), exact, seqs, window, options.get("softcap"))
        self.uncapped = _written_out(query.float(), exact, seqs, window)


@pytest.mark.parametrize("window", [None, 40])
def test_scores_are_capped_softly(window: int | None) -> None:
    did = Attended([(3, 1), (90, 1), (88, 4), (31, 33), (0, 140)], window=window, softcap=0.3, fused=True)
    assert not did.attention.fused  # PyTorch's fused attention has no soft cap
    torch.testing.assert_close(did.out, did.expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(did.out, did.uncapped, rtol=1e-1, atol=1e-1)


def test_queries_may_come_scaled() -> None:
    did = Attended([(40, 1), (0, 200)], scaled=True)
    torch.testing.assert_close(did.out, did.expected, rtol=1e-4, atol=1e-4)


def test_strips_of_scores_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "SCORE_BYTES", HEADS * 310 * 4 * 5)  # five rows of the longest context
    did = Attended([(10, 300)], fused=False)
    torch.testing.assert_close(did.out, did.expected, rtol=1e-4, atol=1e-4)
    assert did.attention._score_memory.take(1).untyped_storage().nbytes() <= 1.5 * cpu_attention.SCORE_BYTES


def test_bfloat16_is_as_close_as_its_scores_allow() -> None:
    """Scores are rounded to bfloat16 before the softmax, as in transformers' eager attention."""
    did = Attended([(40, 1), (0, 200)], dtype="bfloat16", fused=False)
    torch.testing.assert_close(did.out.float(), did.expected, rtol=2e-2, atol=2e-2)
