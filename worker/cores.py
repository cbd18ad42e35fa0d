"""Which cores are whose on a host: each engine's slot is its own, and worker processes keep off all of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
from dataclasses import replace

from worker.spec import WorkerSpec


def claim_slot(spec: WorkerSpec) -> tuple[WorkerSpec, socket.socket | None]:
    """The spec with the first slot of this host that no other worker of this user, with slots as wide, has, whichever
    service that belongs to; it is taken until the socket is closed, or the process ends. A spec that has a slot keeps
    it, and has no socket. OSError where such sockets are not to be had."""
    if spec.slot is not None:
        return spec, None
    width = spec.config.cluster.cores_per_worker
    for slot in itertools.count():
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # An abstract name: the kernel frees it with the process, and no file is left behind.
            claim.bind(f"\0pdserve-slot-{os.getuid()}-{width}-{slot}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return replace(spec, slot=slot), claim
    raise AssertionError("slots have no end")


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
