"""Builds an engine from its spec: model, weights, pool, runner, and scheduler configuration."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from checkpoints.source import resolve_model
from contract.engine import KVReady, Ready
from engine.kernels.cpu_attention import CPUAttention
from engine.kernels.cpu_invariant import InvariantCPUAttention
from engine.model.decoder import Decoder
from engine.model.kv_pool import TORCH_DTYPES, KVPool
from engine.model.layers import FP8_CAPABILITY, multiplies_fp8
from engine.model.loader import load_weights
from engine.model.runner import ModelRunner
from engine.offload import BlockStore, DiskStore, MemoryStore, OffloadConnector
from engine.process.cuda_build import CudaBuild, CudaParts, triton_parts
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import SchedulerConfig
from engine.scheduling.structures import Structures
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, EngineSpec
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import FP8, KVLayout
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
    torch.set_num_threads(spec.threads)
    torch.set_num_interop_threads(1)
    cuda = cuda or Cuda()
    on_gpu = spec.device != "cpu"
    device = _gpu(cuda) if on_gpu else torch.device("cpu")
    source = resolve_model(spec.model, log.info)
    shape = source.shape
    choice = choose_dtype(spec.dtype, shape.dtype, {"": native_dtypes(device.type)})
    if choice.note:
        log.warning("%s", choice.note)
    dtype = choice.dtype
    # The pool must not matter here: the workers of a service may have pools of different sizes.
    long_rope = shape.uses_long_rope(spec.max_model_len or shape.max_position_embeddings)
    shape.check_context(spec.max_model_len)
    keep_fp8 = not spec.batch_invariant and multiplies_fp8(TORCH_DTYPES[dtype], device)
    with source.unchanged():
        model_hash = source.model_hash(long_rope)
        weights = load_weights(source, TORCH_DTYPES[dtype], device, keep_fp8, cuda if on_gpu else None)
    if spec.kv_dtype == "fp8":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise ConfigError("engine.kv_dtype: fp8 needs a GPU of compute capability 8.9 or later; use auto")
        model_hash = xxhash.xxh3_128_hexdigest(model_hash.encode() + weights.scale_kv())
    layout = KVLayout.uniform(
        model_hash=model_hash,
        dtype=FP8 if spec.kv_dtype == "fp8" else dtype,
        block_size=spec.block_size or DEFAULT_BLOCK_SIZE,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    max_context = spec.max_model_len or shape.max_position_embeddings
    if on_gpu:
        parts = cuda_parts(spec)
        build = CudaBuild(spec, cuda, _GPU, parts, pool_memory)
        model = Decoder(weights, max_context, parts.layer_type, long_rope, spec.batch_invariant)
        sized = spec.num_blocks is not None or spec.kv_memory_bytes is not None
        num_blocks = _num_blocks(spec, layout, 0 if sized else build.pool_bytes(model, layout, max_context))
    else:
        num_blocks = _num_blocks(spec, layout, DEFAULT_CPU_KV_BYTES)
    # By default a request may be as long as the pool can hold.
    max_model_len = spec.max_model_len or min(max_context, num_blocks * layout.block_size)
    if on_gpu:
        runner = build.runner(model, layout, num_blocks, max_model_len)
    else:
        model = Decoder(weights, max_model_len, long_rope=long_rope, batch_invariant=spec.batch_invariant)
        _trim_heap()
        pool = KVPool.on_memory_file(layout, num_blocks, memory_fd, model.dtype)
        kind = InvariantCPUAttention if spec.batch_invariant else CPUAttention
        attention = kind(pool, shape.num_heads, model.windows, shape.attention_softcap)
        runner = ModelRunner(model, attention, pool)
        runner.warmup(min(spec.max_num_batched_tokens, max_model_len))
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
    return BuiltEngine(runner, limits, ready, structures)


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


def _num_blocks(spec: EngineSpec, layout: KVLayout, default_bytes: int) -> int:
    if spec.num_blocks is not None:
        return spec.num_blocks
    available = default_bytes if spec.kv_memory_bytes is None else spec.kv_memory_bytes
    if available < layout.block_bytes:
        raise ConfigError(
            f"engine.kv_memory_mb: {available / 2**20:.1f} MiB are less than one block of {layout.block_size} tokens, "
            f"which takes {layout.block_bytes / 2**20:.1f} MiB"
        )
    return available // layout.block_bytes
