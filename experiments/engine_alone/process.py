"""Starts the process in which an engine is measured alone, and reads what it measures."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from engine.process.client import ALLOCATOR_SETTINGS
from experiments.engine_alone.program import Built, Failed, Rates, Sample, Task, Warm
from experiments.messages import message_of
from pdserve.core.errors import LaunchError, from_wire

_MODULE = "experiments.engine_alone.program"
_ROOT = Path(__file__).resolve().parents[2]
_LINE_BYTES = 2**24
_SHOWN_CHARS = 2000


async def measurements(task: Task) -> AsyncGenerator[Built | Warm | Rates | Sample, None]:
    """What `experiments.engine_alone.program` writes about ``task``. The process has the environment of an engine
    process with one thread, and ends with this generator. Raises the error it reports; LaunchError if it just ends;
    WrongMessage if it writes anything else."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(task).decode(),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, limit=_LINE_BYTES,
            env=_environment(),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                message = message_of(line, Built | Warm | Rates | Sample | Failed, _MODULE)
                if isinstance(message, Failed):
                    raise from_wire(message.error, message.message)
                yield message
            status = await process.wait()
            if status:
                log.seek(0)
                said = log.read().decode(errors="replace")[-_SHOWN_CHARS:].strip()
                raise LaunchError(f"the engine under measurement ended with status {status}: {said}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **ALLOCATOR_SETTINGS,
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT),
        "OMP_NUM_THREADS": "1",
    }
