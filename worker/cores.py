"""Keeps a worker process off the cores of the engines."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from worker.spec import WorkerSpec


def leave_engine_cores(spec: WorkerSpec) -> WorkerSpec:
    """Bind this process, with all its threads, to the cores that no engine of this host binds to, so that control and
    transfers never take a step's time; without effect if there are none, as when every core has an engine. The spec
    that comes back remembers which cores there were: engines are bound by it from then on."""
    spec = replace(spec, allowed_cores=tuple(sorted(os.sched_getaffinity(0))))
    if spec.spare_cores:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), spec.spare_cores)
    return spec
