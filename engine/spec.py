"""The configuration of one engine process, which it receives as JSON on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

DEFAULT_BLOCK_SIZE = 64
DEFAULT_CPU_KV_BYTES = 512 * 2**20

ENGINE_MODULE = "engine.process.loop"
"""Module that an engine process runs."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Configuration of one engine. The engine chooses the default of a field that is None."""

    model: str  # argument of `checkpoints.source.resolve_model`
    dtype: str = "auto"  # a value of `ModelConfig.dtype`; ``auto`` is decided by this engine's device alone
    device: str = "cpu"  # ``cpu`` or ``cuda``
    # CPU cores that the engine binds itself to, one thread each (empty: one thread, not bound)
    cores: tuple[int, ...] = ()
    block_size: int | None = None
    num_blocks: int | None = None  # KV blocks in the pool; overrides ``kv_memory_bytes``
    kv_memory_bytes: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    chunk_tokens: int | Literal["off"] | None = None
    batching: Literal["continuous", "static"] = "continuous"
    kv_dtype: Literal["auto", "fp8"] = "auto"  # a value of `EngineConfig.kv_dtype`
    prefix_caching: bool = True
    device_share: float = 1.0  # the share of a GPU's memory that the engine may use by default
    links_bytes: int = 0  # GPU memory that the worker's links take, which the default pool leaves
    cuda_graphs: bool = True  # run decode steps on GPUs as recorded graphs
    run_ahead: bool | None = None  # launch each step before the one before is done; by default on GPUs
    # what computes prompts' attention on GPUs (`engine.kernels.cuda_flashinfer`)
    prefill_attention: Literal["auto", "flashinfer", "triton"] = "auto"
    batch_invariant: bool = False  # what is computed of a request does not depend on the others in its steps
    ngram_drafts: bool = False  # guess next tokens by n-grams
    draft_model: str = ""  # the model that guesses next tokens (argument of `resolve_model`); empty: none does
    tensor_parallel: int = 1  # processes that share the model, each with as many of the cores
    layer_groups: int = 0  # layer groups per step for early KV push (0: push at the end of the step)
    # a folder of this engine alone for cold blocks (None: none), of at most ``offload_disk_bytes``
    offload_folder: str | None = None
    offload_disk_bytes: int = 0
    offload_host_bytes: int = 0  # memory of the host for cold blocks of a GPU

    @property
    def threads(self) -> int:
        """Compute threads of a process: one per core, at least one."""
        return max(1, len(self.cores) // self.tensor_parallel)

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """The cores of a process; all of them if there are too few for each to have its own."""
        each = len(self.cores) // self.tensor_parallel
        return self.cores[rank * each : (rank + 1) * each] if each else self.cores

    @property
    def runs_ahead(self) -> bool:
        """``run_ahead``, or its default. Not with ranks, of which only the first knows the last tokens."""
        return self.tensor_parallel == 1 and (self.device != "cpu" if self.run_ahead is None else self.run_ahead)

    def to_json(self) -> str:
        """Serialize to one line for `from_json`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        """Parse the result of `to_json`. Raises ValueError for anything else."""
        return msgspec.json.decode(text, type=cls)
