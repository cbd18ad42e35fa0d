"""The choice of the kernels for prompts' attention at the start of an engine, and its trial."""

from __future__ import annotations

import logging

import torch

from engine.kernels.cuda_attention import ChunkPlanner
from engine.kernels.cuda_flashinfer import FlashInferPrefill, MakeWrapper, installed_version, make_wrappers
from engine.kernels.cuda_prefill_attention import capability_of
from engine.kernels.prefill_choice import PrefillChoice, PrefillShape, Wanted, choose_prefill
from engine.model.decoder import Decoder
from engine.model.kv_pool import KVPool
from pdserve.core.errors import ConfigError
from runtime.poison import is_poison

log = logging.getLogger(__name__)


class PrefillAttention:
    """Chooses once, for ``wanted``, the value of ``engine.prefill_attention``."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.choice: PrefillChoice | None = None
        self._make: MakeWrapper | None = None  # made once, because of its workspace

    def planner(self, pool: KVPool, model: Decoder) -> ChunkPlanner | None:
        """What plans the chunks of steps over ``pool`` (None: our own kernel). The first call chooses, and tries
        FlashInfer, which compiles its kernels when they are first used. `ConfigError` if FlashInfer was asked for by
        name and cannot be used."""
        if self.choice is None:
            self.choice = choose_prefill(self._wanted, _shape(pool, model), installed_version())
            if self.choice.backend == "flashinfer":
                self._try(pool, model)
            log.info("%s", self.choice)
        return self._flashinfer(pool, model) if self.choice.backend == "flashinfer" else None

    def notes(self) -> list[str]:
        """The choice, for the user."""
        return [str(self.choice)] if self.choice else []

    def _try(self, pool: KVPool, model: Decoder) -> None:
        try:
            self._flashinfer(pool, model).check()
            if pool.tensor.device.type == "cuda":
                torch.cuda.synchronize(pool.tensor.device)
        except Exception as error:  # no compiler, no cubin for this GPU, another version of CUDA
            if is_poison(error):
                raise
            why = f"FlashInfer failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.warning("%s", why, exc_info=True)
            if self._wanted == "flashinfer":
                raise ConfigError(f"engine.prefill_attention: {why}; use auto or triton") from error
            self.choice, self._make = PrefillChoice("triton", why), None

    def _flashinfer(self, pool: KVPool, model: Decoder) -> FlashInferPrefill:
        shape = model.shape
        if self._make is None:
            self._make = make_wrappers(pool.tensor.device)
        return FlashInferPrefill(
            *(self._make, pool, shape.num_heads, model.windows, shape.attention_scale, shape.attention_softcap)
        )


def _shape(pool: KVPool, model: Decoder) -> PrefillShape:
    return PrefillShape(
        dtype=pool.layout.dtype,
        head_dim=pool.head_dim,
        num_heads=model.shape.num_heads,
        num_kv_heads=pool.kv_heads,
        capability=capability_of(pool.tensor.device),
    )
