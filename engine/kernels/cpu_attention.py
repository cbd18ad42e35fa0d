"""Attention on CPUs, in tiles: the keys and values of a tile are copied from their pages into a scratch buffer.

Decodes of similar context share a tile of at most `TILE_BYTES`, which stays in the CPU's cache, so that the KV cache
crosses the memory bus once per step. A larger context of one sequence is still one tile. Those of a tile have equally
many rows: one, and one for each draft.

The context of a prompt chunk is one tile. The queries of the chunk are processed in strips, so that no strip computes
scores for keys it cannot see. Query heads that share a KV head are rows of one product.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.model.attention import Attention, AttentionStep
from engine.model.kv_pool import KVPool, LayerKV
from engine.scheduling.batch import ScheduledSeq

TILE_BYTES = 3 * 2**20  # keys and values of a decode tile, which fit into the caches of one core
SHORT_CONTEXT = 256  # up to this context, one fused call is faster for a single row than two products
COLUMNS_STEP = 32  # the fused attention takes up to twice as long with other numbers of columns
SCORE_BYTES = 6 * 2**20  # scores of a strip
STRIP_ROWS = 128  # more rows waste more work above the diagonal; fewer rows make the products less efficient


_Mask = tuple[int, int, torch.Tensor]
"""Added to the scores of a tile's columns from the first number to the second: 0 or -inf, ``[rows, 1, columns]`` in
decode tiles, ``[rows, columns]`` in strips."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``begin`` to ``end`` of the step, all of decodes or a strip of a chunk. They see columns ``first`` to
    ``last`` of their tile; ``masks`` hide some columns from some rows."""

    begin: int
    end: int
    first: int
    last: int
    masks: list[_Mask]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Decodes, padded to the same number of blocks, or a prompt chunk in strips."""

    pages: torch.Tensor  # of all contexts: [2 * seqs * kv_heads * blocks]
    rows: list[_Rows]
    seqs: int = 1


class _Scratch:
    """A buffer that only grows, by half at least. A tensor from it is valid until the next `take`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.zeros(0, dtype=dtype)

    def take(self, *size: int) -> torch.Tensor:
        """An uninitialised tensor of ``size``."""
        numbers = math.prod(size)
        if numbers > self._buffer.shape[0]:
            self._buffer = torch.zeros(max(numbers, self._buffer.shape[0] * 3 // 2), dtype=self._buffer.dtype)
        return self._buffer[:numbers].view(size)


class CPUAttention(Attention):
    """Attention over ``pool``, for ``num_heads`` query heads and layers with any of ``windows`` (None: no window).

    ``softcap`` caps scores softly: s becomes ``softcap * tanh(s / softcap)`` (None: they stay).
    ``fused`` computes prompt chunks with PyTorch's fused attention, which is faster on CPUs with matrix tiles (AMX) and
    slower on others. By default it depends on the CPU. It has no soft cap, so it is not used with one.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        windows: Collection[int | None],
        softcap: float | None = None,
        fused: bool | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, pool.kv_heads, pool.head_dim
        self.block_size = pool.layout.block_size
        self.softcap = softcap
        if fused is None:
            fused = bool(torch.cpu._is_amx_tile_supported())
        self.fused = fused and softcap is None
        self._stored = _Scratch(pool.tensor.dtype)
        self._keys_values = _Scratch(pool.compute_dtype)
        self._score_memory = _Scratch(pool.compute_dtype)
        self._pool = pool
        self._dtype = pool.compute_dtype
        self.windows = frozenset(windows)
        self._heads = torch.tensor(pool.head_pages)
        self._triangle = torch.full((STRIP_ROWS, STRIP_ROWS), -torch.inf, dtype=self._dtype).triu_(1)

    def plan(self, seqs: Sequence[ScheduledSeq]) -> AttentionStep:
        self.clear_unfilled(seqs)
        decodes = [s for s in seqs if s.decodes]
        chunks, row = seqs[len(decodes) :], sum(len(s.token_ids) for s in decodes)
        plans = {
            window: (self._decode_tiles(decodes, window), self._chunk_tiles(chunks, row, window))
            for window in self.windows
        }
        return _CPUStep(self, self.slots(seqs), plans)

    def clear_unfilled(self, seqs: Sequence[ScheduledSeq]) -> None:
        """Zero the blocks that ``seqs`` start but do not fill. Their unwritten slots are multiplied by 0, which gives
        NaN for infinities that an earlier request may have left."""
        for seq in seqs:
            block, filled = divmod(seq.end, self.block_size)
            if filled and seq.start <= block * self.block_size:
                self._pool.clear(seq.block_ids[block])

    def slots(self, seqs: Sequence[ScheduledSeq]) -> torch.Tensor:
        """The vectors (see `LayerKV`) that keys and values are written to: ``[rows * 2 * kv_heads]``."""
        size = self.block_size
        vectors = torch.tensor([
            s.block_ids[p // size] * self._pool.pages_per_block * size + p % size
            for s in seqs for p in range(s.start, s.start + len(s.token_ids))
        ])  # fmt: skip
        return (vectors[:, None] + self._heads * size).flatten()

    def pages(self, tables: list[list[int]]) -> torch.Tensor:
        """The pages of ``tables`` (``[rows][blocks]``), a flattened ``[2, rows, kv_heads, blocks]``."""
        blocks = torch.tensor(tables)[None, :, None, :] * self._pool.pages_per_block
        return (blocks + self._heads.view(2, 1, -1, 1)).flatten()

    def _decode_tiles(self, seqs: Sequence[ScheduledSeq], window: int | None) -> list[_Tile]:
        size = self.block_size
        block_bytes = 2 * self.num_kv_heads * size * self.head_dim * self._dtype.itemsize
        spans = [(0 if window is None else max(0, s.start + 1 - window) // size, (s.end - 1) // size + 1) for s in seqs]
        tiles: list[_Tile] = []
        begin = row = 0
        while begin < len(seqs):
            widest = narrowest = spans[begin][1] - spans[begin][0]
            end = begin + 1
            while end < len(seqs):
                blocks = spans[end][1] - spans[end][0]
                widest, narrowest = max(widest, blocks), min(narrowest, blocks)
                if (end + 1 - begin) * widest * block_bytes > TILE_BYTES or widest > 2 * narrowest:
                    break
                if seqs[end].num_drafts != seqs[begin].num_drafts:
                    break
                end += 1
            tiles.append(self._decode_tile(seqs[begin:end], spans[begin:end], row, window))
            row += (end - begin) * len(seqs[begin].token_ids)
            begin = end
        return tiles

    def _decode_tile(
        self, seqs: Sequence[ScheduledSeq], spans: Sequence[tuple[int, int]], row: int, window: int | None
    ) -> _Tile:
        size = self.block_size
        blocks = max(last - first for first, last in spans)
        tables: list[list[int]] = []
        lows: list[int] = []
        highs: list[int] = []
        for seq, (first, last) in zip(seqs, spans, strict=True):
            mine = list(seq.block_ids[first:last])
            tables.append(mine + mine[:1] * (blocks - len(mine)))  # padded by one of its blocks, which the mask hides
            for position in range(seq.start, seq.end):
                lows.append(0 if window is None else max(0, position + 1 - window) - first * size)
                highs.append(position + 1 - first * size)
        masks: list[_Mask] = []
        if max(lows):
            columns = torch.arange(max(lows))
            masks.append((0, max(lows), self.hide(columns < torch.tensor(lows)[:, None])[:, None]))
        if min(highs) < blocks * size:
            columns = torch.arange(min(highs), blocks * size)
            hidden = columns >= torch.tensor(highs)[:, None]
            masks.append((min(highs), blocks * size, self.hide(hidden)[:, None]))
        return _Tile(self.pages(tables), [_Rows(row, row + len(lows), max(lows), min(highs), masks)], len(seqs))

    def _chunk_tiles(self, seqs: Sequence[ScheduledSeq], row: int, window: int | None) -> list[_Tile]:
        size = self.block_size
        tiles: list[_Tile] = []
        for seq in seqs:
            rows, context = len(seq.token_ids), seq.start + len(seq.token_ids)
            first_block = 0 if window is None else max(0, seq.start + 1 - window) // size
            tables = [list(seq.block_ids[first_block : -(-context // size)])]
            strips = self._strips(seq.start, rows, row, first_block * size, window)
            tiles.append(_Tile(self.pages(tables), strips))
            row += rows
        return tiles

    def _strips(self, start: int, rows: int, row: int, origin: int, window: int | None) -> list[_Rows]:
        row_bytes = self.num_heads * (start + rows) * self._dtype.itemsize
        height = max(1, min(STRIP_ROWS, SCORE_BYTES // row_bytes))
        strips: list[_Rows] = []
        for begin in range(0, rows, rows if self.fused else height):
            end = rows if self.fused else min(rows, begin + height)
            first = 0 if window is None else max(0, start + begin + 1 - window)
            last = start + end
            if self.fused:  # columns beyond the context are hidden, by the mask or as the rows are causal
                last = min(-(-last // COLUMNS_STEP) * COLUMNS_STEP, -(-last // self.block_size) * self.block_size)
            masks: list[_Mask] = []
            if (window is not None and start + end > window) or (self.fused and start):
                positions, columns = torch.arange(start + begin, start + end)[:, None], torch.arange(first, last)
                hidden = columns > positions
                if window is not None:
                    hidden |= columns <= positions - window
                masks.append((0, last - first, self.hide(hidden)))
            elif not self.fused:
                masks.append((start + begin - first, last - first, self._triangle[: end - begin, : end - begin]))
            strips.append(_Rows(row + begin, row + end, first - origin, last - origin, masks))
        return strips

    def hide(self, hidden: torch.Tensor) -> torch.Tensor:
        """0, and -inf where ``hidden``, to be added to scores."""
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)

    def fetch(self, layer: LayerKV, pages: torch.Tensor, rows: int) -> torch.Tensor:
        """The keys and values in ``pages``: ``[2, rows * kv_heads, columns, head_dim]``, in scratch memory."""
        fetched = self._keys_values.take(pages.shape[0], layer.pages.shape[1])
        if layer.pages.dtype is fetched.dtype:
            torch.index_select(layer.pages, 0, pages, out=fetched)
        else:
            stored = self._stored.take(*fetched.shape)
            torch.index_select(layer.pages.view(torch.uint8), 0, pages, out=stored.view(torch.uint8))
            fetched.copy_(stored)
        return fetched.view(2, rows * self.num_kv_heads, -1, self.head_dim)

    def decode(self, query: torch.Tensor, layer: LayerKV, tile: _Tile, scale: float, out: torch.Tensor) -> None:
        """Compute a tile of decodes into ``out``."""
        (part,) = tile.rows
        rows = part.end - part.begin
        keys, values = self.fetch(layer, tile.pages, tile.seqs)
        # [seqs, rows, kv_heads, group, head_dim]. kv_heads come before rows then, as these share the keys of a head.
        split = (tile.seqs, rows // tile.seqs, self.num_kv_heads, -1, self.head_dim)
        folded = query[part.begin : part.end].view(split).transpose(1, 2).reshape(keys.shape[0], -1, self.head_dim)
        if rows == 1 and part.last - part.first <= SHORT_CONTEXT and self.softcap is None:
            columns = slice(part.first, part.last)
            out[part.begin] = functional.scaled_dot_product_attention(
                folded.unsqueeze(0), keys[None, :, columns], values[None, :, columns], scale=scale
            ).view(-1, self.head_dim)
            return
        scores = self.scores(folded, keys, scale)
        each = scores.view(tile.seqs, self.num_kv_heads, rows // tile.seqs, -1, keys.shape[1])
        for begin, end, hidden in part.masks:
            each[..., begin:end].add_(hidden.view(tile.seqs, 1, rows // tile.seqs, 1, -1))
        torch.softmax(scores, -1, out=scores)
        into = out[part.begin : part.end]
        if rows == tile.seqs:
            torch.bmm(scores, values, out=into.view(folded.shape))
        else:
            attended = torch.bmm(scores, values).view(*each.shape[:-1], self.head_dim)
            into.view(split).copy_(attended.transpose(1, 2))

    def chunk(self, query: torch.Tensor, layer: LayerKV, tile: _Tile, scale: float, out: torch.Tensor) -> None:
        """Compute a prompt chunk into ``out``."""
        fetched = self.fetch(layer, tile.pages, 1)
        for strip in tile.rows:
            keys, values = fetched[:, :, strip.first : strip.last]
            mine, into = query[strip.begin : strip.end], out[strip.begin : strip.end]
            if self.fused:
                attended = functional.scaled_dot_product_attention(
                    mine.transpose(0, 1).unsqueeze(0),
                    keys.unsqueeze(0),
                    values.unsqueeze(0),
                    attn_mask=strip.masks[0][2] if strip.masks else None,
                    is_causal=not strip.masks,
                    scale=scale,
                    enable_gqa=True,
                )
                into.copy_(attended.squeeze(0).transpose(0, 1))
                continue
            rows, (kv_heads, columns, head_dim) = strip.end - strip.begin, keys.shape
            split = (rows, kv_heads, self.num_heads // kv_heads, head_dim)
            folded = mine.view(split).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
            scores = self.scores(folded, keys, scale)
            for begin, end, hidden in strip.masks:
                scores.view(-1, rows, columns)[:, :, begin:end].add_(hidden)
            torch.softmax(scores, -1, out=scores)
            attended = torch.bmm(scores, values).view(kv_heads, -1, rows, head_dim)
            into.view(split).copy_(attended.permute(2, 0, 1, 3))

    def scores(self, query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Products of ``query`` (``[n, rows, head_dim]``) and ``keys`` (``[n, columns, head_dim]``), softly capped, in
        scratch memory: ``[n, rows, columns]``."""
        scores = self._score_memory.take(query.shape[0], query.shape[1], keys.shape[1])
        if scale == 1.0:
            torch.bmm(query, keys.transpose(1, 2), out=scores)
        else:
            torch.baddbmm(scores, query, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, slots=True)
class _CPUStep(AttentionStep):
    attention: CPUAttention
    slots: torch.Tensor
    plans: dict[int | None, tuple[list[_Tile], list[_Tile]]]  # decodes and chunks, by window

    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        decodes, chunks = self.plans[window]
        for tile in decodes:
            self.attention.decode(query, layer, tile, scale, out)
        for tile in chunks:
            self.attention.chunk(query, layer, tile, scale, out)
        return out.flatten(1)
