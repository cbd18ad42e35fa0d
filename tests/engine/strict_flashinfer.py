"""FlashInfer's paged prefill without a GPU: what its documentation says, in float64, and an error for what it does not
allow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


class Misuse(Exception):
    """A call that FlashInfer would answer with wrong numbers, or not at all."""


@dataclass
class Plan:
    """What a wrapper was planned with."""

    rows: list[int]
    blocks: list[int]
    pages: list[int]
    last: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    options: dict[str, Any]


class StrictWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper` with layout HND."""

    def __init__(self) -> None:
        self.planned: Plan | None = None
        self.in_flight = False
        """Set by a test: a GPU has still to copy the last plan from the wrapper's memory on the host."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Check and keep the arguments."""
        if self.in_flight:
            raise Misuse("a wrapper is planned while the GPU has still to copy its last plan")
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            if tensor.device.type != "cpu":
                raise Misuse("plan() waits for arguments that are on the GPU")
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise Misuse("indices are int32 and contiguous")
        rows, blocks, last = (t.tolist() for t in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len))
        if not len(rows) == len(blocks) == len(last) + 1 or rows[0] or blocks[0]:
            raise Misuse("there are as many lengths as requests, and they add up from 0")
        if any(b <= a for ends in (rows, blocks) for a, b in pairwise(ends)):
            raise Misuse("each request has rows and pages")
        if blocks[-1] != paged_kv_indices.shape[0]:
            raise Misuse("paged_kv_indices has as many pages as paged_kv_indptr says")
        if not all(1 <= n <= page_size for n in last):
            raise Misuse("the last page has 1 to page_size tokens")
        if num_qo_heads % num_kv_heads:
            raise Misuse("query heads are a multiple of KV heads")
        if window_left < -1 or kv_data_type != q_data_type:
            raise Misuse("a window is at least 0, or -1; queries and keys have the same type here")
        for number, (a, b) in enumerate(pairwise(rows)):
            context = (blocks[number + 1] - blocks[number] - 1) * page_size + last[number]
            if causal and b - a > context:
                raise Misuse("a request has more rows than context")
        options = {"causal": causal, "scale": sm_scale, "left": window_left, "cap": logits_soft_cap or 0.0}
        self.planned = Plan(
            *(rows, blocks, paged_kv_indices.tolist(), last, num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            options | {"dtype": q_data_type},
        )

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Check the tensors against the plan, and compute."""
        plan = self.planned
        if plan is None:
            raise Misuse("run() before plan()")
        keys, values = paged_kv_cache
        if q.shape != (plan.rows[-1], plan.heads, plan.head_dim) or out.shape != q.shape:
            raise Misuse(f"q is [qo_indptr[-1], heads, head_dim], not {tuple(q.shape)}")
        if keys.shape[1:] != (plan.kv_heads, plan.page_size, plan.head_dim) or values.shape != keys.shape:
            raise Misuse(f"HND pages are [pages, kv_heads, page_size, head_dim], not {tuple(keys.shape)}")
        if keys.stride() != values.stride() or keys.stride(3) != 1 or q.stride(2) != 1 or not out.is_contiguous():
            raise Misuse("k/v strides must be identical, and numbers of a head contiguous")
        if not q.dtype == out.dtype == keys.dtype == values.dtype == plan.options["dtype"]:
            raise Misuse("types are those of the plan")
        for number, last in enumerate(plan.last):
            mine = slice(plan.rows[number], plan.rows[number + 1])
            pages = plan.pages[plan.blocks[number] : plan.blocks[number + 1]]
            context = (len(pages) - 1) * plan.page_size + last
            out[mine] = self._attended(q[mine], keys[pages], values[pages], context).to(out.dtype)
        return out

    def _attended(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int) -> torch.Tensor:
        assert self.planned is not None
        options, group = self.planned.options, self.planned.heads // self.planned.kv_heads
        k, v = (
            part.double().transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, 0)
            for part in (keys, values)
        )
        scale = q.shape[2] ** -0.5 if options["scale"] is None else options["scale"]
        scores = torch.einsum("rhd,hcd->hrc", q.double(), k) * scale
        if options["cap"]:
            scores = options["cap"] * (scores / options["cap"]).tanh()
        positions = torch.arange(context - q.shape[0], context)[:, None]
        columns = torch.arange(context)[None, :]
        hidden = columns > positions if options["causal"] else torch.zeros(q.shape[0], context, dtype=torch.bool)
        if options["left"] >= 0:
            hidden |= columns < positions - options["left"]
        return torch.einsum("hrc,hcd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
