"""Paged attention of prompt chunks in Triton, in tiles of query rows of one head.

A chunk may start anywhere in its context. Its own keys and values are in the pool, as are those before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.cuda_decode_attention import FUSED, capped, score_factors
from engine.kernels.cuda_flashinfer import AMPERE, capability_of


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
        k = tl.load(keys + offsets, mask=loaded, other=0.0)
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
        v = tl.load(values + offsets, mask=loaded, other=0.0)
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
    acc = acc / total[:, None]
    place = ((first_row + rows)[:, None] * tl.num_programs(0) + head) * HEAD_DIM + dims[None, :]
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

    ``tiles`` is ``[tiles, 4]``, int32: sequence, first row, number of rows, position of the first row. A tile has at
    most `tile_rows` rows of one sequence. The tokens up to the last row are in the blocks of ``tables[sequence]``.
    ``keys`` and ``values`` are those of a layer (`engine.model.kv_pool.LayerKV`). ``scale`` and ``softcap`` are those
    of `engine.kernels.cuda_decode_attention.attend_decodes`.
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
