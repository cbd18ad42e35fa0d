"""What a rank of a tensor-parallel engine has of a model: some heads of each layer, and so many columns of its MLPs and
entries of the vocabulary. Each rank computes a part of each sum over them, and the ranks add their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from checkpoints.families import family_of
from checkpoints.shape import ModelShape
from pdserve.core.errors import ConfigError

_UNIT = 32
"""Sizes are cut at multiples of this where all of them are, as products of matrix tiles want it."""


class Ranks(Protocol):
    """The ranks of an engine, as one of them sees them. All call the same methods in the same order."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Put the sum of all ranks' ``x``, which have the same size, into each ``x``, and return it. All have the same
        bits."""
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All ranks' ``x`` side by side, which have ``sizes`` columns, in rank 0. ``x`` in the others."""
        ...

    def meet(self) -> None:
        """Wait for the others to come here."""
        ...


class Kept(NamedTuple):
    """What a rank keeps of a tensor of a checkpoint: some rows, and of these some columns (None: all). ``nothing``: it
    has zeros instead, because rank 0 adds the tensor."""

    rows: Sequence[range] | None = None
    columns: range | None = None
    nothing: bool = False


class Share:
    """The share of a ``rank`` of a model of the shape ``whole``. ``shape`` is its own, and ``kv_heads`` are its KV
    heads: with fewer of them than ranks, ``key_ranks`` ranks have, and write, the same one. ``vocabulary`` has the
    sizes of all ranks' parts. ConfigError for more ranks than heads or so."""

    def __init__(self, whole: ModelShape, rank: int, ranks: int) -> None:
        if ranks > whole.num_heads:
            raise ConfigError(
                f"engine.tensor_parallel: {ranks} devices are more than the {whole.num_heads} heads of the model"
            )
        self.whole, self.rank = whole, rank
        num_parts, per_head = min(ranks, whole.num_kv_heads), whole.num_heads // whole.num_kv_heads
        parts = [each * num_parts // ranks for each in range(ranks)]
        self.key_ranks = parts.count(parts[rank])
        self.kv_heads = _cut(whole.num_kv_heads, parts[rank], num_parts)
        queries = range(self.kv_heads.start * per_head, self.kv_heads.stop * per_head)
        if len(queries) < self.key_ranks:
            raise ConfigError(
                f"engine.tensor_parallel: {ranks} devices are too many for {whole.num_kv_heads} KV heads with "
                f"{per_head} heads each"
            )
        mine = _cut(len(queries), rank - parts.index(parts[rank]), self.key_ranks)
        self._heads = range(queries.start + mine.start, queries.start + mine.stop)
        self._inner = _cut(whole.intermediate_size, rank, ranks, _UNIT)
        experts = whole.experts
        self._expert_inner = range(0) if experts is None else _cut(experts.intermediate_size, rank, ranks, _UNIT)
        self._vocabulary = [_cut(whole.vocab_size, each, ranks, _UNIT) for each in range(ranks)]
        self.vocabulary = [len(each) for each in self._vocabulary]
        self.first_token = self._vocabulary[rank].start
        self.shape = replace(
            whole,
            num_heads=len(self._heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self._inner),
            vocab_size=self.vocabulary[rank],
            experts=experts and replace(experts, intermediate_size=len(self._expert_inner)),
        )

    def kept(self) -> dict[str, Kept]:
        """What it keeps of the tensors of a checkpoint that it does not keep as they are, by name."""
        shape = self.whole
        mine = [self._vocabulary[self.rank]]
        found = {"model.embed_tokens.weight": Kept(mine), "lm_head.weight": Kept(mine)}
        queries, keys = _columns(self._heads, shape.head_dim), _columns(self.kv_heads, shape.head_dim)
        num_queries, num_keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        family = family_of(shape.architecture)
        for layer in range(shape.num_layers):
            has_experts = shape.has_experts(layer)
            inner, size = self._inner, shape.intermediate_size
            if has_experts and shape.experts is not None:
                inner, size = self._expert_inner, shape.experts.intermediate_size
            rows = {
                "qkv": ((num_queries, queries), (num_keys, keys), (num_keys, keys)),
                "gate_up": ((size, inner), (size, inner)),
            }
            columns = {"out": queries, "down": inner}
            for part, modules in family.modules(has_experts).items():
                for number, module in enumerate(modules):
                    kept = Kept(columns=columns.get(part))
                    if part in rows:
                        kept = Kept(_stacked(rows[part]) if len(modules) == 1 else [rows[part][number][1]])
                    bias = kept if part in rows else Kept(nothing=self.rank > 0)
                    for expert in range(shape.experts.count if has_experts and shape.experts else 1):
                        name = f"model.layers.{layer}.{module.replace('experts.0.', f'experts.{expert}.')}"
                        found |= {f"{name}.weight": kept, f"{name}.bias": bias}
            if shape.qk_norm_spans_heads:
                norm = f"model.layers.{layer}.self_attn."
                found |= {f"{norm}q_norm.weight": Kept([queries]), f"{norm}k_norm.weight": Kept([keys])}
        return found


def _cut(size: int, number: int, count: int, unit: int = 1) -> range:
    """The part ``number`` of ``count`` parts of ``size``, cut at multiples of ``unit`` if it is one."""
    if size % unit or size < unit * count:
        unit = 1
    size //= unit
    return range(number * size // count * unit, (number + 1) * size // count * unit)


def _columns(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _stacked(parts: Sequence[tuple[int, range]]) -> list[range]:
    """Ranges of rows of matrices, each with its number of rows, where these are one matrix."""
    found: list[range] = []
    begin = 0
    for size, rows in parts:
        found.append(range(begin + rows.start, begin + rows.stop))
        begin += size
    return found
