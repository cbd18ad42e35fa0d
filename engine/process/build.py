"""Builds an engine from its spec: model, weights, pool, runner, and scheduler configuration."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass

import torch

from engine.kernels.cpu_attention import CPUAttention
from engine.messages import Ready
from engine.model.decoder import LlamaDecoder
from engine.model.dtypes import choose_dtype, native_dtypes
from engine.model.experts import groups_natively
from engine.model.kv_pool import TORCH_DTYPES, KVPool
from engine.model.loader import load_weights
from engine.model.runner import ModelRunner
from engine.model.shape import ModelShape
from engine.model.source import resolve_model
from engine.model.weights import ModelWeights
from engine.scheduling.scheduler import SchedulerConfig
from engine.spec import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, EngineSpec
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KVLayout

log = logging.getLogger(__name__)

_CUDA_SHARE = 0.8  # of the memory that the weights leave free; the rest is for activations


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts that the engine process needs, and the first message that it sends."""

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    ready: Ready


def build_engine(spec: EngineSpec, memory_fd: int) -> BuiltEngine:
    """Load the model, create the pool and warm up. On CPUs the pool is in the memory file ``memory_fd``.

    Raises `ModelError` for a faulty model, and `ConfigError` with the dotted key for settings that do not fit the model
    or the device.
    """
    started_s = time.monotonic()
    torch.set_num_threads(spec.threads)
    torch.set_num_interop_threads(1)
    device = _device(spec.device)
    source = resolve_model(spec.model)
    shape = source.shape
    choice = choose_dtype(spec.dtype, shape.dtype, {"": native_dtypes(device.type)})
    if choice.note:
        log.warning("%s", choice.note)
    dtype = choice.dtype
    # The pool must not matter here: the workers of a service may have pools of different sizes.
    long_rope = shape.uses_long_rope(spec.max_model_len or shape.max_position_embeddings)
    layout = KVLayout.uniform(
        model_hash=source.model_hash(long_rope),
        dtype=dtype,
        block_size=spec.block_size or DEFAULT_BLOCK_SIZE,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    _check_context(spec, shape)
    weights = load_weights(source, TORCH_DTYPES[dtype], device, keep_quantized=device.type == "cuda")
    available = DEFAULT_CPU_KV_BYTES
    if device.type == "cuda":
        available = int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE * spec.device_share)
    num_blocks = _num_blocks(spec, layout, available)
    # By default a request may be as long as the pool can hold.
    max_model_len = spec.max_model_len or min(shape.max_position_embeddings, num_blocks * layout.block_size)
    if device.type == "cpu":
        model = LlamaDecoder(weights, max_model_len, long_rope=long_rope)
        _trim_heap()
        pool = KVPool.on_memory_file(layout, num_blocks, memory_fd)
        attention = CPUAttention(pool, shape.num_heads, model.windows, shape.attention_softcap)
        runner = ModelRunner(model, attention, pool)
        runner.warmup(min(spec.max_num_batched_tokens, max_model_len))
    else:
        pool = KVPool.on_cuda(layout, num_blocks, device)
        runner = _cuda_runner(spec, weights, pool, max_model_len, long_rope)
    ready = Ready(
        layout=layout,
        num_blocks=num_blocks,
        pool_handle=pool.handle,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        cores=list(spec.cores),
        load_s=time.monotonic() - started_s,
        eos_token_ids=sorted(set(shape.eos_token_ids)),
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
    return BuiltEngine(runner, limits, ready)


def _trim_heap() -> None:
    """Return the memory of the unpacked weights to the kernel, which glibc would keep under the allocator settings of
    an engine process. Other C libraries have no such call and need none."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("cluster.device: cuda is set, but torch finds no GPU in the engine process")
    return torch.device("cuda", 0)


def _cuda_runner(
    spec: EngineSpec, weights: ModelWeights, pool: KVPool, max_model_len: int, long_rope: bool
) -> ModelRunner:
    """The runner of a GPU, warmed up, with its graphs recorded. `ConfigError` if Triton is missing."""
    try:  # imported here because engines on CPUs do without Triton
        from engine.kernels.cuda_attention import CUDAAttention
        from engine.kernels.cuda_graphs import DecodeGraphs
        from engine.kernels.cuda_layer import CUDALayer
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster.device: cuda needs Triton, which comes with torch's CUDA builds: {error}") from None
    model = LlamaDecoder(weights, max_model_len, CUDALayer, long_rope)
    attention = CUDAAttention(pool, model.shape.num_heads, model.shape.attention_softcap)
    graphs = None
    grouped = model.shape.quantization is None and groups_natively(weights.norm.dtype, pool.tensor.device)
    recordable = model.shape.experts is None or grouped
    if spec.cuda_graphs and not recordable:
        log.warning("decode runs without CUDA graphs: PyTorch's grouped products of experts are not native here")
    if spec.cuda_graphs and recordable:
        max_blocks = pool.layout.blocks_for(max_model_len)
        graphs = DecodeGraphs(model, attention, pool, spec.max_num_seqs, max_blocks)
        graphs.capture()
    runner = ModelRunner(model, attention, pool, graphs)
    runner.warmup(min(spec.max_num_batched_tokens, max_model_len))
    return runner


def _check_context(spec: EngineSpec, shape: ModelShape) -> None:
    if spec.max_model_len is not None and spec.max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len: {spec.max_model_len} exceeds the model's context of "
            f"{shape.max_position_embeddings} tokens"
        )


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
