"""What an engine process is told at its start: one plain value, handed over as JSON on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

DEFAULT_BLOCK_SIZE = 64
DEFAULT_CPU_KV_BYTES = 512 * 2**20

ENGINE_MODULE = "engine.process.loop"
"""What an engine process runs, as a module: ``python -m engine.process.loop``."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. Fields that are None get their default in the engine, which knows the model and the device.

    ``model`` is what `engine.model.source.resolve_model` takes; ``dtype`` is a value of `ModelConfig.dtype`, of which
    auto is decided by this engine's device alone; ``device`` is cpu or cuda. The engine binds itself to ``cores``
    (none: it is not bound, and uses one thread). ``num_blocks`` wins over ``kv_memory_bytes``. ``device_share`` is the
    part of its device that is its own: of a GPU's free memory it takes no more by default. ``cuda_graphs`` has a GPU
    run decode steps as recorded graphs. ``layer_groups``: in how many groups of layers a step tells that KV to be
    pushed is in place (0: only when all are).
    """

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    chunk_tokens: int | Literal["off"] | None = None
    batching: Literal["continuous", "static"] = "continuous"
    prefix_caching: bool = True
    device_share: float = 1.0
    cuda_graphs: bool = True
    layer_groups: int = 0

    @property
    def threads(self) -> int:
        """Threads of the engine's arithmetic: one per core."""
        return max(1, len(self.cores))

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        """The spec that `to_json` described; TypeError or ValueError if it is none."""
        data = json.loads(text)
        return cls(**{**data, "cores": tuple(data["cores"])})
