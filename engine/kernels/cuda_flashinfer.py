"""Attention of prompt chunks by FlashInfer's paged prefill where it can compute them, else by our own kernel.

FlashInfer reads pages in place as well: the keys and values of a layer are views of the pool,
``[blocks, kv_heads, block_size, head_dim]``, which is its layout HND with pages a whole block of the pool apart.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch

from engine.model.decoder import Decoder
from engine.model.kv_pool import KVPool
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.scheduler import MAX_IN_FLIGHT
from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from runtime.cuda import upload
from runtime.poison import is_poison

log = logging.getLogger(__name__)

_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends, for the parts of contexts that are split
_NO_WINDOW = -1
AMPERE = (8, 0)

MakeWrapper = Callable[[], Any]
"""Makes a `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; that of Ampere for the interpreter's CPU tensors."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else AMPERE


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
    return lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")


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

    def plan(self, seqs: Sequence[ScheduledSeq]) -> Mapping[int | None, Any]:
        """Plan the step of the chunks ``seqs``. Returns a wrapper for each window, whose ``run`` computes the attention
        of all their rows (``[rows, heads, head_dim]``) over the keys and values of a layer."""
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
                q_data_type=pool.compute_dtype,
                kv_data_type=pool.tensor.dtype,
            )
        return wrappers

    def check(self) -> None:
        """Plan and compute a chunk over the first block, which is not changed. Compiles the kernels if they are not.
        Raises what FlashInfer raises."""
        rows = min(2, self._pool.layout.block_size)
        plan = self.plan([ScheduledSeq("check", [0] * rows, 0, [0], False, SamplingParams())])
        shape = (rows, self._num_heads, self._pool.head_dim)
        query = torch.zeros(shape, dtype=self._pool.compute_dtype, device=self._pool.tensor.device)
        layer = self._pool.layers[0]
        for wrapper in plan.values():
            wrapper.run(query, (layer.k, layer.v), out=torch.empty_like(query))


def _pinned(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """``numbers`` on the host, where FlashInfer plans, and ready to be copied to ``device`` without waiting."""
    host = torch.as_tensor(numbers, dtype=torch.int32)
    return host.pin_memory() if device.type == "cuda" else host


# --- the choice -----------------------------------------------------------------------------------------------------


Wanted = Literal["auto", "flashinfer", "triton"]

FLASHINFER = "flashinfer-python"
LEAST_FLASHINFER = (0, 6)
"""Before, its kernels for Hopper took pages to be contiguous; ours are those of a layer, a whole block apart."""

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)


def obstacle(flashinfer: str | None, capability: tuple[int, int], dtype: str, head_dim: int) -> str | None:
    """Why version ``flashinfer`` (None: it is not installed) cannot compute prompts on a GPU of this compute
    capability, with such a pool; None if it can. It has sliding windows, soft caps and any block size."""
    if flashinfer is None:
        return f"{FLASHINFER} is not installed (extra cuda)"
    if _release(flashinfer) < LEAST_FLASHINFER:
        return f"{FLASHINFER} {flashinfer} is older than {_dotted(LEAST_FLASHINFER)}"
    if capability < AMPERE:
        return f"the GPU's compute capability {_dotted(capability)} is below {_dotted(AMPERE)}"
    if dtype not in _DTYPES:
        return f"it does not compute in {dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"it has no heads of {head_dim} (only {', '.join(map(str, _HEAD_DIMS))})"
    return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of ``version``: (0, 7, 2) of 0.7.2.post1."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: Collection[int]) -> str:
    return ".".join(map(str, numbers))


class PrefillAttention:
    """What computes the attention of prompts, chosen once, for ``wanted``, the value of `engine.prefill_attention`."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._notes: list[str] = []
        self._make: MakeWrapper | None = None  # made once, because of its workspace; None: our own kernel computes

    def notes(self) -> list[str]:
        """The choice, for the user, once there is one."""
        return self._notes

    def planner(self, pool: KVPool, model: Decoder) -> FlashInferPrefill | None:
        """What plans the chunks of steps over ``pool`` (None: our own kernel). The first call chooses, and tries
        FlashInfer, which compiles its kernels when they are first used. `ConfigError` if FlashInfer was asked for by
        name and cannot be used."""
        if not self._notes:
            by, why = "triton", "engine.prefill_attention says so"
            if self._wanted != "triton":
                by, why = self._tried(pool, model)
            self._notes = [f"prefill attention by {by}: {why}"]
            log.info("%s", *self._notes)
        return None if self._make is None else self._flashinfer(self._make, pool, model)

    def _tried(self, pool: KVPool, model: Decoder) -> tuple[str, str]:
        """Try FlashInfer. Returns what computes, and why."""
        device, installed = pool.tensor.device, installed_version()
        why = obstacle(installed, capability_of(device), str(pool.compute_dtype).removeprefix("torch."), pool.head_dim)
        if why is not None:
            if self._wanted == "flashinfer":
                raise ConfigError(f"engine.prefill_attention: flashinfer cannot be used: {why}; use auto or triton")
            return "triton", why
        try:
            make = make_wrappers(device)
            self._flashinfer(make, pool, model).check()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # no compiler, no cubin for this GPU, another version of CUDA
            if is_poison(error):
                raise
            why = f"FlashInfer failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.warning("%s", why, exc_info=True)
            if self._wanted == "flashinfer":
                raise ConfigError(f"engine.prefill_attention: {why}; use auto or triton") from error
            return "triton", why
        self._make = make
        return "flashinfer", f"{FLASHINFER} {installed}"

    def _flashinfer(self, make: MakeWrapper, pool: KVPool, model: Decoder) -> FlashInferPrefill:
        shape = model.shape
        return FlashInferPrefill(
            *(make, pool, shape.num_heads, model.windows, shape.attention_scale, shape.attention_softcap)
        )
