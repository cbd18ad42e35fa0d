"""The start of an engine on a GPU: profile the largest steps, size the pool by them, share it, record decode steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.attention import Attention
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.kv_pool import POOL_DTYPES, KVPool
from engine.model.layers import groups_natively
from engine.model.runner import ModelRunner, RecordedSteps
from engine.model.token_draw import DrawRows
from engine.scheduling.batch import ScheduledSeq, StepTooLarge
from engine.spec import EngineSpec
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KVLayout
from pdserve.core.sampling import SamplingParams
from runtime.cuda import Cuda
from runtime.mps import memory_limit

log = logging.getLogger(__name__)

CONTEXT_BYTES = 640 * 2**20
"""A CUDA context with its libraries and loaded kernels, outside of torch's allocator."""

_PROCESSES = 2  # engine and worker have a context each
_USABLE = 0.95  # of what is left after contexts; the rest is for fragmentation
_GRAPH_BYTES = 64 * 2**20  # what the driver keeps for recorded graphs, besides their tensors

# It needs the most memory: penalties and filters copy the logits.
_COSTLY = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, seed=0, logit_bias={0: 1.0}, logprobs=1)


@dataclass(frozen=True, slots=True)
class CudaParts:
    """What computes on a GPU."""

    layer_type: type[DecoderLayer]
    attention: Callable[[KVPool, Decoder], Attention]
    graphs: Callable[[Decoder, KVPool, Attention, int, int], RecordedSteps]
    """Takes the largest batch and the blocks of the longest sequence."""
    draw_rows: DrawRows | None = None
    notes: Callable[[], list[str]] = list
    """Messages for the user once all has been built."""
    check: Callable[[KVPool, Decoder], None] = lambda pool, model: None
    """Whether the attention is right on this GPU; `ConfigError` if not. Uses the pool."""


def triton_parts(spec: EngineSpec) -> CudaParts:
    """The parts made of Triton kernels, and the kernels for prompts that ``spec`` and the model allow. `ConfigError` if
    Triton is missing."""
    try:  # imported here because engines on CPUs do without Triton
        from engine.kernels.cuda_attention import CUDAAttention, check_attention
        from engine.kernels.cuda_flashinfer import PrefillAttention
        from engine.kernels.cuda_graphs import DecodeGraphs
        from engine.kernels.cuda_layer import CUDALayer
        from engine.kernels.cuda_top_p import draw_rows
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster.device: cuda needs Triton, which comes with torch's CUDA builds: {error}") from None

    def graphs(model: Decoder, pool: KVPool, attention: Attention, seqs: int, blocks: int) -> RecordedSteps:
        assert isinstance(attention, CUDAAttention)
        return DecodeGraphs(model, attention, pool, seqs, blocks)

    prefill = PrefillAttention("triton" if spec.batch_invariant else spec.prefill_attention)

    def attention(pool: KVPool, model: Decoder) -> Attention:
        shape = model.shape
        return CUDAAttention(pool, shape.attention_softcap, prefill.planner(pool, model), spec.batch_invariant)

    def check(pool: KVPool, model: Decoder) -> None:
        check_attention(pool, model.shape, prefill.planner(pool, model))

    return CudaParts(CUDALayer, attention, graphs, draw_rows, prefill.notes, check)


class CudaBuild:
    """Builds the engine of ``spec`` on GPU ``index``, which `Cuda.init` has made the current one.
    ``max_context`` of its methods is the longest sequence that the model and the configuration allow."""

    def __init__(
        self, spec: EngineSpec, cuda: Cuda, index: int, parts: CudaParts, pool_memory: Callable[[int], list[Any]]
    ) -> None:
        self._spec, self._cuda, self._index, self._parts = spec, cuda, index, parts
        self._pool_memory = pool_memory

    def pool_bytes(self, model: Decoder, layout: KVLayout, max_context: int, draft_graphs: int = 0) -> int:
        """The pool's default size, or that of the pools of both models, if there is a draft model, whose graphs keep
        ``draft_graphs`` bytes. Runs the largest steps over a pool of one block, whose content does not matter."""
        figures = self._cuda.memory(self._index)
        held = figures.held
        largest = self._peak(model, layout, min(self._spec.max_num_batched_tokens, max_context)) - held
        decodes = self._peak(model, layout, 0) - held if self._recordable(model) else 0
        limit = memory_limit(os.environ, self._index)
        size = default_pool_bytes(
            *(figures.total, self._spec.device_share, held + draft_graphs, largest, decodes, limit),
            links_bytes=self._spec.links_bytes,
        )
        log.info(
            "of %.0f MiB x %.2f: %.0f MiB weights, %.0f MiB for a step, %.0f MiB for graphs, %.0f MiB KV pool",
            figures.total / 2**20,
            self._spec.device_share,
            *(each / 2**20 for each in (held, largest, decodes, size)),
        )
        return size

    def runner(self, model: Decoder, layout: KVLayout, num_blocks: int, max_model_len: int) -> ModelRunner:
        """The pool and its runner, warmed up, with its graphs recorded."""
        pool = KVPool.on_cuda(layout, num_blocks, self._cuda, self._index, self._pool_memory, model.dtype)
        self._parts.check(pool, model)
        attention = self._parts.attention(pool, model)
        graphs = None
        if self._spec.cuda_graphs and not self._recordable(model):
            log.warning("decode runs without CUDA graphs: experts need PyTorch's grouped products, which are native in "
                        "bfloat16 on some GPUs, and compute neither in FP8 nor batch-invariantly")  # fmt: skip
        if self._recordable(model):
            blocks = layout.blocks_for(max_model_len)
            graphs = self._parts.graphs(model, pool, attention, self._spec.max_num_seqs, blocks)
            graphs.capture(self._cuda, self._index)
        runner = ModelRunner(model, attention, pool, graphs, self._cuda, self._parts.draw_rows)
        runner.warmup(min(self._spec.max_num_batched_tokens, max_model_len))
        runner.execute([ScheduledSeq("warmup", [0], 0, [0], True, _COSTLY)])  # compiles the sampler's kernel
        return runner

    def graph_bytes(self, model: Decoder, layout: KVLayout) -> int:
        """What the recorded decode steps of a further model keep."""
        held = self._cuda.memory(self._index).held
        return self._peak(model, layout, 0) - held + _GRAPH_BYTES if self._recordable(model) else 0

    def _recordable(self, model: Decoder) -> bool:
        """Whether decode steps are recorded. Those of experts have to be native grouped products."""
        if not self._spec.cuda_graphs:
            return False
        grouped = model.shape.experts is None or groups_natively(model.dtype, model.device)
        return grouped and not model.reads_back

    def _peak(self, model: Decoder, layout: KVLayout, prompt_tokens: int) -> int:
        """The most memory in use during a step of ``prompt_tokens`` of one prompt and a decode for every other request,
        which all sample."""
        flat = self._cuda.zeros(layout.block_bytes, self._index).view(POOL_DTYPES[layout.dtype])
        pool = KVPool(layout, 1, flat, {}, model.dtype)
        attention = self._parts.attention(pool, model)
        runner = ModelRunner(model, attention, pool, None, self._cuda, self._parts.draw_rows)
        decodes = self._spec.max_num_seqs - (prompt_tokens > 0)
        seqs = [ScheduledSeq(f"decode-{i}", [0], 0, [0], True, _COSTLY) for i in range(decodes)]
        if prompt_tokens:
            table = [0] * layout.blocks_for(prompt_tokens)
            seqs.append(ScheduledSeq("prompt", [0] * prompt_tokens, 0, table, True, _COSTLY))
        try:
            with torch.inference_mode():
                runner.execute(seqs)  # compiles and loads kernels, which is not what is measured
                self._cuda.reset_peak(self._index)
                runner.execute(seqs)
        except StepTooLarge as error:
            raise ConfigError(
                f"engine.max_num_batched_tokens: the GPU lacks memory for a step of {prompt_tokens} prompt tokens and "
                f"{decodes} decodes ({error}); lower it or engine.max_num_seqs"
            ) from None
        return self._cuda.memory(self._index).peak


def default_pool_bytes(
    total_bytes: int,
    share: float,
    held: int,
    step: int,
    graphs: int = 0,
    limit_bytes: int | None = None,
    links_bytes: int = 0,
) -> int:
    """Bytes for the pool of an engine that has the share ``share`` (0 to 1) of a GPU with ``total_bytes``, and may
    allocate at most ``limit_bytes``; 0 if nothing is left. No figure depends on the moment, so two engines that start
    at once on one GPU get the same pools as two that start one after the other.

    The engine's other bytes: ``held``, weights and tables; ``step``, the largest step's activations, logits and
    sampling, at its peak; ``graphs``, the same for the largest decode step, whose memory recorded graphs keep (0: no
    graphs). ``links_bytes`` are those of the worker's links.
    """
    mine = total_bytes * share - _PROCESSES * CONTEXT_BYTES - links_bytes
    if limit_bytes is not None:
        mine = min(mine, limit_bytes - CONTEXT_BYTES)
    return max(0, int(mine * _USABLE) - held - step - (graphs + _GRAPH_BYTES if graphs else 0))
