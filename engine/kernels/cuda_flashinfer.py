"""Attention of prompt chunks by FlashInfer's paged prefill, which reads pages in place like our own kernels.

The keys and values of a layer are views of the pool, ``[blocks, kv_heads, block_size, head_dim]``: FlashInfer's layout
HND, with pages a whole block of the pool apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import numpy as np
import torch

from engine.kernels.prefill_choice import FLASHINFER
from engine.model.kv_pool import KVPool, LayerKV
from engine.model.upload import upload
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.scheduler import MAX_IN_FLIGHT
from pdserve.core.sampling import SamplingParams

_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends, for the parts of contexts that are split
_NO_WINDOW = -1


class Wrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, as far as it is used here."""

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
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Plan the rows of a step."""
        ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the planned rows over a layer."""
        ...


MakeWrapper = Callable[[], Wrapper]


def installed_version() -> str | None:
    """The version of FlashInfer, if it is installed."""
    try:
        return version(FLASHINFER)
    except PackageNotFoundError:
        return None


def make_wrappers(device: torch.device) -> MakeWrapper:
    """Makes wrappers that share a workspace on ``device``, as the kernels of one stream run one after the other.
    ImportError if FlashInfer cannot be imported."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def make() -> Wrapper:
        wrapper: Wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        return wrapper

    return make


@dataclass(frozen=True, slots=True)
class FlashInferChunks:
    """The chunks of one step, planned: a wrapper for each window."""

    wrappers: Mapping[int | None, Wrapper]
    scale: float

    def attend(self, query: torch.Tensor, layer: LayerKV, window: int | None, scale: float, out: torch.Tensor) -> None:
        """Compute the attention of ``query`` (``[rows, heads, head_dim]``, the rows of all chunks in order) into
        ``out`` (the same shape, contiguous)."""
        if scale != self.scale:
            raise ValueError(f"attention was planned with scale {self.scale}, not {scale}")
        self.wrappers[window].run(query, (layer.k, layer.v), out=out)


class FlashInferPrefill:
    """Plans the chunks of steps over ``pool``, for ``num_heads`` query heads and layers with any of ``windows`` (None:
    no window). Scores are multiplied by ``scale``, then softly capped by ``softcap`` (None: not at all).

    A plan goes to the GPU from memory of its wrapper on the host. So each step in flight has wrappers of its own.
    """

    def __init__(
        self,
        make_wrapper: MakeWrapper,
        pool: KVPool,
        num_heads: int,
        windows: Collection[int | None],
        scale: float,
        softcap: float | None,
    ) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._scale = scale
        self._softcap = softcap
        self._sets = [{window: make_wrapper() for window in windows} for _ in range(MAX_IN_FLIGHT)]

    def plan(self, seqs: Sequence[ScheduledSeq]) -> FlashInferChunks:
        """Plan the step of the chunks ``seqs``, whose rows follow each other."""
        wrappers = self._sets.pop(0)
        self._sets.append(wrappers)
        pool, block_size = self._pool, self._pool.layout.block_size
        device = pool.tensor.device
        ends = np.array([seq.end for seq in seqs])
        num_blocks = -(-ends // block_size)
        tables = np.concatenate([seq.block_ids[:blocks] for seq, blocks in zip(seqs, num_blocks, strict=True)])
        rows, blocks, last = (
            _pinned(numbers, device)
            for numbers in (
                np.cumsum([0, *(len(seq.token_ids) for seq in seqs)]),
                np.cumsum([0, *num_blocks]),
                ends - (num_blocks - 1) * block_size,
            )
        )
        table = upload(tables, torch.int32, device)
        for window, wrapper in wrappers.items():
            wrapper.plan(
                rows,
                blocks,
                table,
                last,
                self._num_heads,
                pool.kv_heads,
                pool.head_dim,
                block_size,
                causal=True,
                sm_scale=self._scale,
                window_left=_NO_WINDOW if window is None else window - 1,
                logits_soft_cap=self._softcap,
                q_data_type=pool.tensor.dtype,
                kv_data_type=pool.tensor.dtype,
            )
        return FlashInferChunks(wrappers, self._scale)

    def check(self) -> None:
        """Plan and compute a chunk over the first block, which is not changed. Compiles the kernels if they are not.
        Raises what FlashInfer raises."""
        rows = min(2, self._pool.layout.block_size)
        plan = self.plan([ScheduledSeq("check", [0] * rows, 0, [0], False, SamplingParams())])
        shape = (rows, self._num_heads, self._pool.head_dim)
        query = torch.zeros(shape, dtype=self._pool.tensor.dtype, device=self._pool.tensor.device)
        for window in plan.wrappers:
            plan.attend(query, self._pool.layers[0], window, self._scale, torch.empty_like(query))


def _pinned(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """``numbers`` on the host, where FlashInfer plans, and ready to be copied to ``device`` without waiting."""
    host = torch.as_tensor(numbers, dtype=torch.int32)
    return host.pin_memory() if device.type == "cuda" else host
