"""Builds an engine from its spec: model, weights, pool, runner, and scheduler configuration."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from checkpoints.draft import resolve_draft
from checkpoints.shape import ModelShape
from checkpoints.source import ModelSource, resolve_model
from contract.engine import KVReady, Ready
from engine.kernels.cpu_attention import CPUAttention
from engine.kernels.cpu_invariant import InvariantCPUAttention
from engine.model.decoder import Decoder
from engine.model.draft_model import DraftModel
from engine.model.kv_pool import TORCH_DTYPES, KVPool
from engine.model.layers import FP8_CAPABILITY, multiplies_fp8
from engine.model.loader import load_weights
from engine.model.runner import ModelRunner
from engine.model.share import Share
from engine.model.weights import ModelWeights
from engine.offload import BlockStore, DiskStore, MemoryStore, OffloadConnector
from engine.process.cuda_build import CudaBuild, CudaParts, triton_parts
from engine.process.ranks import OtherRanks, PoolReady, SharedSums
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import SchedulerConfig
from engine.scheduling.speculation import Drafter, NgramDrafter
from engine.scheduling.structures import Structures
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, EngineSpec
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import FP8, KVLayout
from runtime import memory_file
from runtime.cuda import Cuda
from runtime.dtypes import choose_dtype, native_dtypes

log = logging.getLogger(__name__)

_GPU = 0  # Ray shows a worker its own GPU alone


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts that the engine process needs, and the first message that it sends."""

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    ready: Ready
    structures: Structures
    drafter: Drafter | None


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft model that has been loaded."""

    weights: ModelWeights
    layout: KVLayout
    long_rope: bool

    @property
    def max_positions(self) -> int:
        return self.weights.shape.max_position_embeddings


def build_engine(
    spec: EngineSpec,
    memory_fd: int,
    cuda: Cuda | None = None,
    cuda_parts: Callable[[EngineSpec], CudaParts] = triton_parts,
    woken: Callable[[], None] = lambda: None,
    pool_memory: Callable[[int], list[Any]] = lambda num_bytes: [],
) -> BuiltEngine:
    """Load the model, create the pool and warm up. On CPUs the pool is in the memory file ``memory_fd``; on GPUs in
    memory of the worker, which ``pool_memory`` asks for (`contract.engine.WantsPool`). ``cuda`` is how GPUs are reached
    (default: torch). ``woken`` is called, in another thread, when a structure has been compiled.

    Raises `ModelError` for a faulty model, and `ConfigError` with the dotted key for settings that do not fit the model
    or the device.
    """
    started_s = time.monotonic()
    _set_threads(spec)
    cuda = cuda or Cuda()
    on_gpu = spec.device != "cpu"
    if on_gpu and spec.tensor_parallel > 1:
        raise ConfigError("engine.tensor_parallel: pdserve's engine is tensor-parallel on CPUs alone so far")
    device = _gpu(cuda) if on_gpu else torch.device("cpu")
    source = resolve_model(spec.model, log.info)
    shape = source.shape
    choice = choose_dtype(spec.dtype, shape.dtype, {"": native_dtypes(device.type)})
    if choice.note:
        log.warning("%s", choice.note)
    dtype = choice.dtype
    long_rope = _uses_long_rope(spec, shape)
    shape.check_context(spec.max_model_len)
    share = Share(shape, 0, spec.tensor_parallel) if spec.tensor_parallel > 1 else None
    others = OtherRanks(spec, memory_fd) if share is not None else None
    keep_fp8 = not spec.batch_invariant and multiplies_fp8(TORCH_DTYPES[dtype], device)
    with source.unchanged():
        model_hash = source.model_hash(long_rope)
        weights = load_weights(source, TORCH_DTYPES[dtype], device, keep_fp8, cuda if on_gpu else None, share)
    if spec.kv_dtype == "fp8":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise ConfigError("engine.kv_dtype: fp8 needs a GPU of compute capability 8.9 or later; use auto")
        model_hash = xxhash.xxh3_128_hexdigest(model_hash.encode() + weights.scale_kv())
    layout = _layout(spec, shape, model_hash, FP8 if spec.kv_dtype == "fp8" else dtype)
    draft = _load_draft(spec, source, dtype, device, cuda if on_gpu else None)
    block_bytes = layout.block_bytes + (0 if draft is None else draft.layout.block_bytes)
    max_context = spec.max_model_len or shape.max_position_embeddings
    if on_gpu:
        parts = cuda_parts(spec)
        build = CudaBuild(spec, cuda, _GPU, parts, pool_memory)
        model = Decoder(weights, max_context, parts.layer_type, long_rope, spec.batch_invariant)
        gpu_draft = None if draft is None else _GpuDraft(spec, draft, cuda, cuda_parts)
        sized = spec.num_blocks is not None or spec.kv_memory_bytes is not None
        graph_bytes = 0 if sized or gpu_draft is None else gpu_draft.graph_bytes()
        default_bytes = 0 if sized else build.pool_bytes(model, layout, max_context, graph_bytes)
    else:
        default_bytes = DEFAULT_CPU_KV_BYTES
    num_blocks = _num_blocks(spec, block_bytes, layout.block_size, default_bytes)
    # By default a request may be as long as the pool can hold.
    max_model_len = spec.max_model_len or min(max_context, num_blocks * layout.block_size)
    if on_gpu:
        runner = build.runner(model, layout, num_blocks, max_model_len)
        draft_runner = None if gpu_draft is None else gpu_draft.runner(num_blocks, max_model_len)
    else:
        runner = _cpu_runner(spec, weights, max_model_len, layout, num_blocks, memory_fd, share, others)
        if others is not None:
            others.begin(PoolReady(num_blocks, max_model_len))
        runner.warmup(min(spec.max_num_batched_tokens, max_model_len))
        draft_runner = None if draft is None else _cpu_draft_runner(spec, draft, num_blocks, max_model_len)
    drafter: Drafter | None = NgramDrafter() if spec.ngram_drafts else None
    if draft is not None and draft_runner is not None:
        drafter = DraftModel(draft_runner, draft.max_positions, shape.vocab_size)
    tokenizer = None if source.folder is None else source.folder / "tokenizer.json"
    structures = Structures(tokenizer, shape.vocab_size, shape.eos_token_ids, woken)
    ready = Ready(
        layout=layout,
        dtype=dtype,
        num_blocks=num_blocks,
        pool_handle=runner.pool.handle,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        device=cuda.name(_GPU) if on_gpu else "cpu",
        cores=list(spec.cores),
        load_s=time.monotonic() - started_s,
        eos_token_ids=sorted(set(shape.eos_token_ids)),
        notes=parts.notes() if on_gpu else [],
    )
    limits = SchedulerConfig(
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        max_model_len=max_model_len,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        eos_token_ids=shape.eos_token_ids,
        prefix_caching=spec.prefix_caching,
        chunk_tokens=None if spec.chunk_tokens == "off" else spec.chunk_tokens,
    )
    return BuiltEngine(runner, limits, ready, structures, drafter)


def build_rank(spec: EngineSpec, rank: int, sums: SharedSums) -> Callable[[int, int, int], ModelRunner]:
    """Load what another rank than 0 has of the model. Returns what makes its runner when the pool is there: from its
    number of blocks, the number of positions, and its memory file."""
    _set_threads(spec)
    source = resolve_model(spec.model)
    shape, dtype = source.shape, choose_dtype(spec.dtype, source.shape.dtype, {"": native_dtypes("cpu")}).dtype
    share = Share(shape, rank, spec.tensor_parallel)
    weights = load_weights(source, TORCH_DTYPES[dtype], torch.device("cpu"), share=share)

    def make(num_blocks: int, max_positions: int, pool_fd: int) -> ModelRunner:
        layout = _layout(spec, shape, "", dtype)
        return _cpu_runner(spec, weights, max_positions, layout, num_blocks, pool_fd, share, sums)

    return make


def _set_threads(spec: EngineSpec) -> None:
    torch.set_num_threads(spec.threads)
    torch.set_num_interop_threads(1)


def _uses_long_rope(spec: EngineSpec, shape: ModelShape) -> bool:
    # The pool must not matter here: the workers of a service may have pools of different sizes.
    return shape.uses_long_rope(spec.max_model_len or shape.max_position_embeddings)


def _layout(spec: EngineSpec, shape: ModelShape, model_hash: str, dtype: str) -> KVLayout:
    block_size = spec.block_size or DEFAULT_BLOCK_SIZE
    return KVLayout.uniform(model_hash, dtype, block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim)


def _load_draft(
    spec: EngineSpec, target: ModelSource, dtype: str, device: torch.device, cuda: Cuda | None
) -> _Draft | None:
    """The draft model that guesses tokens of ``target``, if ``spec`` names one. A tensor-parallel engine has all of it
    in rank 0."""
    if not spec.draft_model:
        return None
    source = resolve_draft(spec.draft_model, target, log.info)
    keep_fp8 = multiplies_fp8(TORCH_DTYPES[dtype], device)
    weights = load_weights(source, TORCH_DTYPES[dtype], device, keep_fp8, cuda)
    return _Draft(weights, _layout(spec, source.shape, "", dtype), _uses_long_rope(spec, source.shape))


def _draft_spec(spec: EngineSpec) -> EngineSpec:
    """How a draft model is computed: guesses may depend on the batch."""
    return replace(spec, batch_invariant=False, prefill_attention="auto", tensor_parallel=1)


class _GpuDraft:
    """The draft model of an engine on a GPU, with a pool that nobody else reads."""

    def __init__(
        self, spec: EngineSpec, draft: _Draft, cuda: Cuda, cuda_parts: Callable[[EngineSpec], CudaParts]
    ) -> None:
        spec = _draft_spec(spec)
        parts = cuda_parts(spec)
        self._build = CudaBuild(spec, cuda, _GPU, parts, lambda num_bytes: [])
        self._layout, self._max_positions = draft.layout, draft.max_positions
        self._model = Decoder(draft.weights, draft.max_positions, parts.layer_type, draft.long_rope)

    def graph_bytes(self) -> int:
        return self._build.graph_bytes(self._model, self._layout)

    def runner(self, num_blocks: int, max_model_len: int) -> ModelRunner:
        return self._build.runner(self._model, self._layout, num_blocks, min(max_model_len, self._max_positions))


def _cpu_draft_runner(spec: EngineSpec, draft: _Draft, num_blocks: int, max_model_len: int) -> ModelRunner:
    spec = _draft_spec(spec)
    fd = memory_file.create("pdserve-draft")
    try:
        runner = _cpu_runner(spec, draft.weights, draft.max_positions, draft.layout, num_blocks, fd, None, None)
    finally:
        os.close(fd)
    runner.warmup(min(spec.max_num_batched_tokens, max_model_len, draft.max_positions))
    return runner


def _cpu_runner(
    spec: EngineSpec,
    weights: ModelWeights,
    max_positions: int,
    layout: KVLayout,
    num_blocks: int,
    pool_fd: int,
    share: Share | None,
    ranks: OtherRanks | SharedSums | None,
) -> ModelRunner:
    """The runner of a CPU, which is a rank if there is a ``share``: rank 0 if it has `OtherRanks`."""
    lead, sums = (ranks.lead, ranks.sums) if isinstance(ranks, OtherRanks) else (None, ranks)
    whole = weights.shape if share is None else share.whole
    long_rope = _uses_long_rope(spec, whole)
    batch_invariant = spec.batch_invariant
    model = Decoder(
        weights, max_positions, long_rope=long_rope, batch_invariant=batch_invariant, share=share, ranks=sums
    )
    _trim_heap()
    heads = None if share is None else share.kv_heads
    made = share is not None and share.rank > 0
    pool = KVPool.on_memory_file(layout, num_blocks, pool_fd, model.dtype, heads, made)
    kind = InvariantCPUAttention if batch_invariant else CPUAttention
    attention = kind(pool, model.shape.num_heads, model.windows, model.shape.attention_softcap)
    return ModelRunner(model, attention, pool, lead=lead)


def make_connector(spec: EngineSpec, pool: KVPool, clock: Clock, done: Callable[[KVReady], None]) -> KVConnector:
    """The connector of a worker, which also keeps cold blocks if ``spec`` asks for it. `ConfigError` if the folder
    cannot be used."""
    store: BlockStore | None = None
    if spec.offload_folder is not None:
        kind = xxhash.xxh3_128_hexdigest(msgspec.json.encode(pool.layout))
        store = DiskStore(Path(spec.offload_folder), kind, spec.offload_disk_bytes)
    if spec.offload_host_bytes:
        if spec.device == "cpu":
            raise ConfigError(
                "engine.offload_host_mb: the pool of a CPU is memory of the host already; raise engine.kv_memory_mb"
            )
        store = MemoryStore(spec.offload_host_bytes, store)
    if store is None:
        return KVConnector(clock, pool.layout, spec.layer_groups)
    return OffloadConnector(clock, pool.layout, spec.layer_groups, store, pool.read, pool.write, done)


def _trim_heap() -> None:
    """Return the memory of the unpacked weights to the kernel, which glibc would keep under the allocator settings of
    an engine process. Other C libraries have no such call and need none."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _gpu(cuda: Cuda) -> torch.device:
    if not cuda.is_available():
        raise ConfigError("cluster.device: cuda is set, but torch finds no GPU in the engine process")
    return cuda.init(_GPU)


def _num_blocks(spec: EngineSpec, block_bytes: int, block_size: int, default_bytes: int) -> int:
    """``block_bytes``: of a block of each pool."""
    if spec.num_blocks is not None:
        return spec.num_blocks
    available = default_bytes if spec.kv_memory_bytes is None else spec.kv_memory_bytes
    if available < block_bytes:
        raise ConfigError(
            f"engine.kv_memory_mb: {available / 2**20:.1f} MiB are less than one block of {block_size} tokens, "
            f"which takes {block_bytes / 2**20:.1f} MiB"
        )
    return available // block_bytes
