"""Paged attention in Triton, of decodes and of prompt chunks.

Decodes have one query row per sequence, whose context is split over several programs. A program processes one row, one
KV head and one split of the context; the last one of a row and KV head to arrive combines the splits. The query heads
that share the KV head are the rows of one tile, so that keys and values are read once. The number of programs depends
on the batch size only, so that a CUDA graph can replay a launch. Programs without work end at once.

A prompt chunk is computed in tiles of query rows of one head. It may start anywhere in its context. Its own keys and
values are in the pool, as are those before it.

Kernels are not specialised to arguments whose values or alignment change between steps, since each change would compile
the kernel again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.cuda_flashinfer import AMPERE, capability_of

COLUMNS = 64  # keys and values of one tile
LOG2_E = 1.4426950408889634
FUSED = {"enable_fp_fusion": True}  # the default changes in Triton 3.10, and 3.9 warns about it


@triton.jit
def capped(scores, scale, softcap, SOFTCAPPED: tl.constexpr):
    """Scores in powers of 2, from products of queries and keys; see `score_factors`."""
    if SOFTCAPPED:
        return (2.0 * tl.sigmoid(scores * scale) - 1.0) * softcap
    return scores * scale


@triton.jit(do_not_specialize=["tables", "contexts", "table_row", "table_column"])
def _attend_split(
    query,  # [rows, heads, head_dim]
    keys,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_DIM], the blocks ``block_stride`` apart
    values,
    tables,  # [rows, blocks], int32
    contexts,  # [rows], int32
    partials,  # [rows, heads, SPLITS, HEAD_DIM], float32: sums of values, not yet divided
    maxima,  # [rows, heads, SPLITS], float32: the largest score, in powers of 2
    totals,  # the same: sums of weights
    arrivals,  # [rows, kv_heads], int32, zeros before and after: programs that have stored their split
    out,  # [rows, heads, HEAD_DIM]
    scale,
    softcap,
    window,
    query_row,
    query_head,
    block_stride,
    table_row,
    table_column,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    # The first visible column, and the bounds of the split, which starts at a multiple of the tile size.
    first = tl.maximum(context - window, 0)
    origin = first // COLUMNS * COLUMNS
    tiles = (context - origin + COLUMNS - 1) // COLUMNS
    split_tiles = (tiles + SPLITS - 1) // SPLITS
    begin = origin + split * split_tiles * COLUMNS
    end = tl.minimum(begin + split_tiles * COLUMNS, context)
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    used = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + heads
    row_head = row * tl.num_programs(1) * GROUP + head
    result = out + row_head[:, None] * HEAD_DIM + dims[None, :]
    if begin >= end:
        if context == 0 and split == 0:  # a row of padding
            tl.store(result, tl.zeros([ROWS, DIMS], out.dtype.element_ty), mask=used)
        return
    q = tl.load(query + row * query_row + head[:, None] * query_head + dims[None, :], mask=used, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        seen = (columns >= first) & (columns < context)
        if BLOCK_SIZE % COLUMNS == 0:  # a tile lies in one block
            block = tl.load(tables + row * table_row + start // BLOCK_SIZE * table_column).to(tl.int64)
            offsets = block * block_stride + columns % BLOCK_SIZE * HEAD_DIM
        else:
            blocks = tl.load(tables + row * table_row + columns // BLOCK_SIZE * table_column, mask=seen, other=0)
            offsets = blocks.to(tl.int64) * block_stride + columns % BLOCK_SIZE * HEAD_DIM
        offsets = (offsets + kv_head * (BLOCK_SIZE * HEAD_DIM))[:, None] + dims[None, :]
        loaded = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=loaded, other=0.0).to(q.dtype)
        scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every tile has a column that is seen, so that the maximum is finite from here on.
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        rest = tl.exp2(largest - now)
        total = total * rest + tl.sum(weights, 1)
        v = tl.load(values + offsets, mask=loaded, other=0.0).to(q.dtype)
        acc = acc * rest[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = now
    place = row_head * SPLITS + split
    tl.store(partials + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=used)
    tl.store(maxima + place, largest, mask=heads < GROUP)
    tl.store(totals + place, total, mask=heads < GROUP)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = arrivals + row * tl.num_programs(1) + kv_head
    splits = (tiles + split_tiles - 1) // split_tiles
    if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived, 0)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        for other in range(0, splits):
            place = row_head * SPLITS + other
            top = tl.load(maxima + place, mask=heads < GROUP, other=0.0, cache_modifier=".cg")
            now = tl.maximum(largest, top)
            rest = tl.exp2(largest - now)
            weight = tl.exp2(top - now)
            part = tl.load(totals + place, mask=heads < GROUP, other=0.0, cache_modifier=".cg")
            total = total * rest + part * weight
            sums = tl.load(
                partials + place[:, None] * HEAD_DIM + dims[None, :], mask=used, other=0.0, cache_modifier=".cg"
            )
            acc = acc * rest[:, None] + sums * weight[:, None]
            largest = now
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows beyond the heads
        tl.store(result, acc.to(out.dtype.element_ty), mask=used)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The arguments ``scale`` and ``softcap`` of the kernels, for scores that are multiplied by ``scale`` and capped
    softly by ``softcap`` (None: not at all). They include the factor of powers of 2, and that of a tanh by a sigmoid:
    tanh(x) = 2 * sigmoid(2 * x) - 1."""
    return (scale * LOG2_E, 0.0) if softcap is None else (2.0 * scale / softcap, softcap * LOG2_E)


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    window: int,
    scale: float,
    splits: int,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    softcap: float | None = None,
) -> None:
    """Compute the attention of ``query`` (``[rows, heads, head_dim]``) into ``out`` (the same shape, contiguous).

    Row i sees the last ``window`` of its first ``contexts[i]`` tokens, in the blocks of ``tables[i]``. If its context
    is 0, it reads no block and its result is 0. ``keys`` and ``values`` are those of a layer
    (`engine.model.kv_pool.LayerKV`). Scores s become ``scale * s``, and then ``softcap * tanh(s / softcap)`` if
    there is a soft cap. ``splits`` is a power of 2. ``arrivals`` are at least ``rows * kv_heads`` zeros (int32), which
    they are again afterwards.
    """
    rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    group = heads // kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))
    columns = COLUMNS if query.dtype.itemsize * dims <= 512 else COLUMNS // 2
    partials = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=query.device)
    maxima = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    totals = torch.empty_like(maxima)
    _attend_split[(rows, kv_heads, splits)](
        query,
        keys,
        values,
        tables,
        contexts,
        partials,
        maxima,
        totals,
        arrivals,
        out,
        *score_factors(scale, softcap),
        window,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        tables.stride(0),
        tables.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        ROWS=max(16, triton.next_power_of_2(group)),
        COLUMNS=columns,
        DIMS=dims,
        SOFTCAPPED=softcap is not None,
        num_warps=4,
        num_stages=3,
        **FUSED,
    )


@triton.jit
def _columns(
    acc,
    largest,
    total,
    q,
    keys,
    values,
    table,
    table_column,
    block_stride,
    positions,
    begin,
    end,
    last,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Process the tiles from column ``begin`` to ``end``. Unless ``MASKED``, every row sees all of them."""
    dims = tl.arange(0, DIMS)
    for start in range(begin, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if BLOCK_SIZE % COLUMNS == 0:  # a tile lies in one block
            block = tl.load(table + start // BLOCK_SIZE * table_column).to(tl.int64)
            offsets = block * block_stride + columns % BLOCK_SIZE * HEAD_DIM
        else:
            blocks = tl.load(table + columns // BLOCK_SIZE * table_column, mask=columns <= last, other=0)
            offsets = blocks.to(tl.int64) * block_stride + columns % BLOCK_SIZE * HEAD_DIM
        offsets = offsets[:, None] + dims[None, :]
        loaded = (columns <= last)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=loaded, other=0.0).to(q.dtype)
        scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAPPED)
        if MASKED:
            seen = columns[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (columns[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        finite = now
        if WINDOWED:  # a row may see nothing of the first tiles
            finite = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - finite[:, None])
        rest = tl.exp2(largest - finite)
        total = total * rest + tl.sum(weights, 1)
        v = tl.load(values + offsets, mask=loaded, other=0.0).to(q.dtype)
        acc = acc * rest[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = now
    return acc, largest, total


@triton.jit(do_not_specialize=["tables", "tiles", "table_row", "table_column"])
def _attend_tile(
    query,  # [rows, heads, head_dim]
    keys,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_DIM], the blocks ``block_stride`` apart
    values,
    tables,  # [sequences, blocks], int32
    tiles,  # [tiles, 4], int32: sequence, first row, number of rows, position of the first row
    out,  # [rows, heads, head_dim]
    scale,
    softcap,
    window,
    query_row,
    query_head,
    block_stride,
    table_row,
    table_column,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    count = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    last = position + count - 1
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    used = (rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        query + (first_row + rows)[:, None] * query_row + head * query_head + dims[None, :], mask=used, other=0.0
    )
    # Rows beyond the last repeat it and are not stored.
    positions = position + tl.minimum(rows, count - 1)
    table = tables + sequence * table_row
    head_offset = head // GROUP * (BLOCK_SIZE * HEAD_DIM)
    keys += head_offset
    values += head_offset
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    # Columns ``begin`` to ``full`` are seen by some rows, to ``edge`` by all, to ``last`` by some again.
    begin = 0
    full = 0
    edge = (position + 1) // COLUMNS * COLUMNS
    if WINDOWED:
        begin = tl.maximum(position + 1 - window, 0) // COLUMNS * COLUMNS
        full = (tl.maximum(last + 1 - window, 0) + COLUMNS - 1) // COLUMNS * COLUMNS
        edge = tl.maximum(edge, begin)
        full = tl.minimum(full, edge)
        acc, largest, total = _columns(
            acc, largest, total, q, keys, values, table, table_column, block_stride, positions, begin, full, last,
            scale, softcap, window, HEAD_DIM, BLOCK_SIZE, COLUMNS, DIMS, True, True, SOFTCAPPED,
        )  # fmt: skip
    acc, largest, total = _columns(
        acc, largest, total, q, keys, values, table, table_column, block_stride, positions, full, edge, last,
        scale, softcap, window, HEAD_DIM, BLOCK_SIZE, COLUMNS, DIMS, False, WINDOWED, SOFTCAPPED,
    )  # fmt: skip
    acc, largest, total = _columns(
        acc, largest, total, q, keys, values, table, table_column, block_stride, positions, edge, last + 1, last,
        scale, softcap, window, HEAD_DIM, BLOCK_SIZE, COLUMNS, DIMS, True, WINDOWED, SOFTCAPPED,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = ((first_row + rows)[:, None] * tl.num_programs(0) + head) * HEAD_DIM + dims[None, :]
    used = (rows < tl.maximum(count, 1))[:, None] & (dims < HEAD_DIM)[None, :]  # the result of padding is 0
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=used)


def tile_rows(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Largest number of query rows of a tile of `attend_chunks`."""
    if dtype.itemsize > 2:
        return 32  # no tensor cores: larger tiles would spill registers
    largest = 128 if capability_of(device) >= AMPERE else 64  # older GPUs have 64 KiB of shared memory per program
    return 128 if head_dim <= largest else 64


def attend_chunks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    window: int | None,
    scale: float,
    out: torch.Tensor,
    softcap: float | None = None,
) -> None:
    """Compute the attention of the rows in ``tiles`` of ``query`` (``[rows, heads, head_dim]``) into ``out`` (the same
    shape, contiguous).

    ``tiles`` is ``[tiles, 4]``, int32: sequence, first row, number of rows (0: padding, a row whose result is 0),
    position of the first row. A tile has at most `tile_rows` rows of one sequence. The tokens up to the last row are in
    the blocks of ``tables[sequence]``. ``keys`` and ``values`` are those of a layer
    (`engine.model.kv_pool.LayerKV`). ``scale`` and ``softcap`` are those of
    `engine.kernels.cuda_paged_attention.attend_decodes`.
    """
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    dims = max(16, triton.next_power_of_2(head_dim))
    rows = tile_rows(head_dim, query.dtype, query.device)
    _attend_tile[(heads, tiles.shape[0])](
        query,
        keys,
        values,
        tables,
        tiles,
        out,
        *score_factors(scale, softcap),
        window or 0,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        tables.stride(0),
        tables.stride(1),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        COLUMNS=64 if rows == 128 else 32,
        DIMS=dims,
        WINDOWED=window is not None,
        SOFTCAPPED=softcap is not None,
        num_warps=8 if rows == 128 else 4,
        num_stages=3 if capability_of(query.device) >= AMPERE else 1,  # older GPUs cannot copy ahead
        **FUSED,
    )
