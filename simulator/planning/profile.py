"""What a run of ``pdserve experiment profile`` says of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import msgspec

from pdserve.core.config import EngineConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv_layout import KVLayout
from pdserve.core.worker import Role
from simulator.planning.service import LinkClass, Overheads, PlannedWorker
from simulator.planning.step_time import KNOTS, MeasuredSteps

PROFILE = "profile"
"""The name of the experiment."""


class Profiled(msgspec.Struct, frozen=True):
    """A finished profile. ``chunk``: tokens of a step; ``pool_tokens``: of a worker; ``spread``: see
    `PlannedWorker`."""

    path: str
    model: str
    dtype: str
    device: str
    chunk: int
    block_size: int
    pool_tokens: int
    steps: MeasuredSteps
    error: float
    overheads: Overheads
    link: LinkClass
    spread: tuple[float, ...]

    @classmethod
    def read(cls, path: Path, name: str) -> Self:
        """The profile in the folder of a run. InvalidRequest, which says that ``name`` is wrong, if it is none, or not
        complete."""
        file = path / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(file.read_bytes())
        except OSError as error:
            raise InvalidRequest(
                f"{name}: {file} cannot be read ({error.strerror}); name the folder of a finished run of "
                "`pdserve experiment profile`"
            ) from None
        except ValueError:
            raise InvalidRequest(f"{name}: {file} is not JSON; measure the profile again") from None
        other_version = InvalidRequest(f"{name}: the profile in {path} is of another version; measure it again")
        try:
            if (of := summary["experiment"]) != PROFILE:
                raise InvalidRequest(f"{name}: {path} is a run of {of}, not of {PROFILE}")
            if summary["overheads"] is None or summary["link"] is None:
                raise InvalidRequest(f"{name}: the profile in {path} is not complete; go on with --resume {path}")
            if tuple(summary["steps"]["knots"]) != KNOTS:
                raise other_version
            kept = {key: summary[key] for key in cls.__struct_fields__ if key in summary}
            return msgspec.convert({**kept, "path": str(path), "error": summary["steps"]["error"]}, cls)
        except (KeyError, TypeError, msgspec.ValidationError):
            raise other_version from None

    def layout(self, model: KVLayout) -> KVLayout:
        """The layout of the ``model``'s KV, with the dtype and the blocks that were profiled."""
        return msgspec.structs.replace(model, dtype=self.dtype, block_size=self.block_size)

    def worker(self, worker_id: str, role: Role, host: str, engine: EngineConfig) -> PlannedWorker:
        """A worker on the device that was profiled."""
        num_blocks = self.pool_tokens // self.block_size
        return PlannedWorker(
            worker_id, role, host, self.steps, num_blocks, self.chunk, engine.max_num_seqs, spread=self.spread
        )
