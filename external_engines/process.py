"""The process of a server that pdserve starts, with its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from runtime.process import end_with_parent

_ROOT = str(Path(__file__).resolve().parents[1])
_LAUNCH = f"import sys; sys.path.insert(0, {_ROOT!r}); from external_engines.process import become; become()"
"""Without PYTHONPATH, which the server would inherit: it may have a virtual environment of its own."""


def become() -> None:
    """The first code of the process, whose arguments are ``CORES COMMAND…`` (CORES: numbers separated by commas; empty:
    all): bind it to the cores, have it end with its parent, and become the server."""
    cores, *command = sys.argv[1:]
    end_with_parent(signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


class ServerProcess:
    """Created by `start` and ended by `stop`, or with the thread that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ended = asyncio.create_task(process.wait())
        """Its exit status, once it has ended."""

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int]) -> Self:
        """Start ``command``, bound to ``cores`` (empty: not bound). What it writes goes where this process's output
        goes."""
        bound = ",".join(map(str, cores))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _LAUNCH, bound, *command),
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, and wait for it and all that it has started, which remove their files in /dev/shm.
        What still runs after ``timeout_s`` is killed."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.ended)
                while self._has_processes():  # noqa: ASYNC110 - they tell nobody
                    await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.pid, signal.SIGKILL)
        await self.ended

    def _has_processes(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True
