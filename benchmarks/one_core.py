"""Programs that measure an engine in their own process, on one core, under the settings that an engine process gets."""

from __future__ import annotations

import os
import sys

from benchmarks.frame import ROOT
from engine.process.client import ALLOCATOR_SETTINGS

_CORES = "PDSERVE_BENCH_CORES"  # set: this process is bound already; these are all cores it might have used


def on_one_core(module: str, *, cuda: bool = False) -> list[int]:
    """Restart the program ``module`` bound to the first allowed core (not with ``cuda``), and with settings that Python
    and glibc read when they start. Returns all cores that were allowed, the chosen one first."""
    if not os.environ.get(_CORES):
        cores = sorted(os.sched_getaffinity(0))
        if not cuda:
            os.sched_setaffinity(0, cores[:1])
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _CORES: ",".join(map(str, cores))}
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings, **ALLOCATOR_SETTINGS})
    return [int(core) for core in os.environ[_CORES].split(",")]
