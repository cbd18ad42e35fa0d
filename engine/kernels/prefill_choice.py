"""Which kernels compute the attention of prompt chunks on a GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pdserve.core.errors import ConfigError

PrefillBackend = Literal["flashinfer", "triton"]
Wanted = Literal["auto", "flashinfer", "triton"]

FLASHINFER = "flashinfer-python"
LEAST_FLASHINFER = (0, 6)
"""Before, its kernels for Hopper took pages to be contiguous; ours are those of a layer, a whole block apart."""

_LEAST_CAPABILITY = (8, 0)
_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a backend must support: the pool's dtype, head size and heads, and the GPU's compute capability. All
    backends have sliding windows, soft caps and any block size."""

    dtype: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """``backend``, and ``reason`` for users."""

    backend: PrefillBackend
    reason: str

    def __str__(self) -> str:
        return f"prefill attention by {self.backend}: {self.reason}"


def choose_prefill(wanted: Wanted, shape: PrefillShape, flashinfer: str | None) -> PrefillChoice:
    """The backend for ``wanted``, the value of ``engine.prefill_attention``. ``flashinfer`` is the installed version of
    FlashInfer (None: there is none). `ConfigError` if FlashInfer is wanted and cannot be used."""
    if wanted == "triton":
        return PrefillChoice("triton", "engine.prefill_attention says so")
    obstacle = _obstacle(shape, flashinfer)
    if obstacle is None:
        return PrefillChoice("flashinfer", f"{FLASHINFER} {flashinfer}")
    if wanted == "flashinfer":
        raise ConfigError(f"engine.prefill_attention: flashinfer cannot be used: {obstacle}; use auto or triton")
    return PrefillChoice("triton", obstacle)


def _obstacle(shape: PrefillShape, flashinfer: str | None) -> str | None:
    """Why FlashInfer cannot compute ``shape``; None if it can."""
    if flashinfer is None:
        return f"{FLASHINFER} is not installed (extra cuda)"
    if _release(flashinfer) < LEAST_FLASHINFER:
        return f"{FLASHINFER} {flashinfer} is older than {_dotted(LEAST_FLASHINFER)}"
    if shape.capability < _LEAST_CAPABILITY:
        return f"the GPU's compute capability {_dotted(shape.capability)} is below {_dotted(_LEAST_CAPABILITY)}"
    if shape.dtype not in _DTYPES:
        return f"it does not compute in {shape.dtype}"
    if shape.head_dim not in _HEAD_DIMS:
        return f"it has no heads of {shape.head_dim} (only {', '.join(map(str, _HEAD_DIMS))})"
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads are no multiple of {shape.num_kv_heads} KV heads"
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
