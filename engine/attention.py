"""Attention over the paged KV pool: write this step's keys and values, then attend, sequence by sequence for prompt
chunks and batched for decodes. What a step looks like comes in as `AttnMetadata`, built once for all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn import functional

from engine.batch import ScheduledSeq
from engine.kv_pool import LayerKV

Masks = dict[int | None, torch.Tensor | None]
"""By window: with a window of w a token sees itself and the w - 1 before it, with None all before it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``begin`` to ``end`` of the step are one sequence's chunk. ``block_ids`` (``[blocks]``) hold its context and
    itself; None if nothing came before it: the fresh keys and values are all there is. ``masks``: for each window an
    additive ``[rows, context]``, or None where plain causal attention over the fresh keys does."""

    begin: int
    end: int
    block_ids: torch.Tensor | None
    masks: Masks


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows ``begin`` to ``end`` are single tokens of sequences with similar context, padded to the same number of
    blocks. ``block_ids`` ``[rows * blocks]``; ``masks``, for each window ``[rows, 1, 1, blocks * block_size]``
    (additive)."""

    begin: int
    end: int
    block_ids: torch.Tensor
    masks: Masks


@dataclass(frozen=True, slots=True)
class AttnMetadata:
    """One step: where each row's K/V goes (``slot_blocks``, ``slot_offsets``: ``[rows]``) and who attends to what."""

    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


def step_order(seqs: Sequence[ScheduledSeq], block_size: int) -> list[ScheduledSeq]:
    """``seqs`` in the order in which `attention_metadata` wants their rows: decodes of similar context side by side,
    then chunks."""
    return sorted(seqs, key=lambda s: (len(s.token_ids) > 1, _bucket(s, block_size)))


def attention_metadata(
    seqs: Sequence[ScheduledSeq],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None] = (None,),
) -> AttnMetadata:
    """Metadata for rows laid out as ``seqs`` in `step_order`, for layers with any of ``windows``."""
    slots = torch.tensor(
        [s.block_ids[p // block_size] * block_size + p % block_size
         for s in seqs for p in range(s.start, s.start + len(s.token_ids))]
    )  # fmt: skip
    decodes: list[DecodeGroup] = []
    chunks: list[Chunk] = []
    row = 0
    for (is_chunk, _), grouped in groupby(seqs, key=lambda s: (len(s.token_ids) > 1, _bucket(s, block_size))):
        group = list(grouped)
        if is_chunk:
            for seq in group:
                chunks.append(_chunk(seq, row, block_size, dtype, device, windows))
                row += len(seq.token_ids)
        else:
            decodes.append(_decode_group(group, row, block_size, dtype, device, windows))
            row += len(group)
    return AttnMetadata((slots // block_size).to(device), (slots % block_size).to(device), decodes, chunks)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerKV,
    meta: AttnMetadata,
    window: int | None = None,
) -> torch.Tensor:
    """Write ``key`` and ``value`` (``[rows, kv_heads, head_dim]``) into the pool, then attend with ``query``
    (``[rows, heads, head_dim]``) to the last ``window`` tokens. Returns the same shape as ``query``."""
    layer.k[meta.slot_blocks, :, meta.slot_offsets] = key
    layer.v[meta.slot_blocks, :, meta.slot_offsets] = value
    out = torch.empty_like(query)
    for group in meta.decodes:
        out[group.begin : group.end] = _decode(query[group.begin : group.end], layer, group, window)
    for chunk in meta.chunks:
        rows = slice(chunk.begin, chunk.end)
        out[rows] = _prefill(query[rows], key[rows], value[rows], layer, chunk, window)
    return out


def _decode(query: torch.Tensor, layer: LayerKV, group: DecodeGroup, window: int | None) -> torch.Tensor:
    rows, _, head_dim = query.shape
    _, _, kv_heads, _, _ = layer.kv.shape
    # One gather of the blocks in use for K and V together; the permuted result needs no second copy.
    gathered = layer.kv.permute(1, 2, 0, 3, 4).index_select(2, group.block_ids)
    keys, values = gathered.view(2, kv_heads, rows, -1, head_dim).transpose(1, 2)  # [rows, kv_heads, context, head_dim]
    # Heads that share a KV head become query rows: single-row products are several times slower without AMX.
    attended = functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, -1, head_dim), keys, values, attn_mask=group.masks[window]
    )
    return attended.reshape(rows, -1, head_dim)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerKV,
    chunk: Chunk,
    window: int | None,
) -> torch.Tensor:
    mask = chunk.masks[window]
    if chunk.block_ids is None or mask is None:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, context, head_dim]
    else:
        _, _, kv_heads, _, head_dim = layer.kv.shape
        gathered = layer.kv.permute(1, 2, 0, 3, 4).index_select(2, chunk.block_ids)
        keys, values = gathered.view(2, kv_heads, -1, head_dim)[:, :, : mask.shape[1]]
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def _bucket(seq: ScheduledSeq, block_size: int) -> int:
    """Sequences of one bucket differ by less than a factor of two in blocks, so padding wastes less than half."""
    return (-(-(seq.start + len(seq.token_ids)) // block_size)).bit_length()


def _chunk(
    seq: ScheduledSeq,
    row: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None],
) -> Chunk:
    rows = len(seq.token_ids)
    context = seq.start + rows
    masks: Masks = {}
    for window in windows:
        if seq.start == 0 and (window is None or window >= rows):
            masks[window] = None
            continue
        mask = torch.full((rows, context), -torch.inf, dtype=dtype, device=device).triu_(seq.start + 1)
        if window is not None:
            mask += torch.full_like(mask, -torch.inf).tril_(seq.start - window)
        masks[window] = mask
    blocks = None if seq.start == 0 else torch.tensor(seq.block_ids[: -(-context // block_size)], device=device)
    return Chunk(row, row + rows, blocks, masks)


def _decode_group(
    seqs: Sequence[ScheduledSeq],
    row: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None],
) -> DecodeGroup:
    blocks = max(-(-(s.start + 1) // block_size) for s in seqs)
    ids: list[int] = []
    for seq in seqs:
        mine = list(seq.block_ids[: -(-(seq.start + 1) // block_size)])
        ids += mine + mine[:1] * (blocks - len(mine))  # padding repeats a block of its own; the masks hide it
    contexts = torch.tensor([s.start + 1 for s in seqs])[:, None]
    places = torch.arange(blocks * block_size)
    masks: Masks = {}
    for window in windows:
        hidden = places >= contexts
        if window is not None:
            hidden |= places < contexts - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        masks[window] = mask[:, None, None].to(device)
    return DecodeGroup(row, row + len(seqs), torch.tensor(ids, device=device), masks)
