"""Divides a host's cores: every engine claims cores of its own, and worker processes avoid all claimed cores.

A claim on a core is a socket with an abstract name. The kernel gives a name to one process only and frees it when that
process ends, so claims are exclusive and never outlive their worker. Names are per network namespace: all users and
services of a host see each other's claims, but containers with networks of their own do not.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.core.worker import SharedCores
from worker.spec import WorkerSpec

_NAMES = Path("/proc/net/unix")
_CLAIM = re.compile(r"@pdserve-core-(\d+)-\d+$")
_HOLDER = re.compile(r"@pdserve-holder-(\d+)-(\d+)-(\d+)-(\d+)-(\w*)-([\w.-]*)$")
_WHY_OWN = "as Ray was told of more cores than the node has, or its other cores have more engines"
_SERVICE_CHARS = 8
_WORKER_CHARS = 32


@dataclass(frozen=True, slots=True)
class CoreHolder:
    """A worker that has claimed ``core``: its process and user, and its service's public port and id."""

    core: int
    pid: int
    uid: int
    port: int
    service: str
    worker_id: str

    def __str__(self) -> str:
        user = "" if self.uid == os.getuid() else f" of user {self.uid}"
        return f"{self.worker_id} of the service on port {self.port} (process {self.pid}{user})"


def claim_cores(spec: WorkerSpec, allowed: Sequence[int] | None = None) -> tuple[WorkerSpec, contextlib.ExitStack]:
    """Claim cores for the engine of ``spec``. Returns the spec with these cores, and the claims, which are held until
    they are closed or the process ends.

    Takes cores from ``allowed`` (default: all that this process may use): first those without an engine, then those
    with the fewest. On a GPU, engines are not bound and no core is claimed. OSError if the host has no abstract
    sockets."""
    held = contextlib.ExitStack()
    if spec.device != "cpu":
        return spec, held
    allowed = sorted(os.sched_getaffinity(0)) if allowed is None else allowed
    width = min(spec.num_cores, len(allowed))
    engines = Counter(int(match[1]) for name in _names() if (match := _CLAIM.search(name)))
    claims: dict[int, socket.socket] = {}
    for level in itertools.count(min(engines[core] for core in allowed)):
        for core in allowed:
            if len(claims) < width and core not in claims and engines[core] <= level:
                claim = _first_free(f"pdserve-core-{core}", level + 1)
                if claim is not None:
                    claims[core] = claim
        if len(claims) == width:
            break
    for each in (*claims.values(), *(_bind(_holder_name(spec, core)) for core in claims)):
        if each is not None:
            held.enter_context(each)
    return replace(spec, cores=tuple(sorted(claims))), held


def core_holders() -> list[CoreHolder]:
    """The claims on this host's cores, sorted by core."""
    found = []
    for name in _names():
        if match := _HOLDER.search(name):
            core, pid, uid, port, service, worker_id = match.groups()
            found.append(CoreHolder(int(core), int(pid), int(uid), int(port), service, worker_id))
    return sorted(found, key=lambda holder: (holder.core, holder.port, holder.worker_id))


def is_of_service(holder: CoreHolder, spec: WorkerSpec) -> bool:
    """Whether the holder belongs to the service of ``spec``."""
    return (holder.port, holder.service) == (spec.config.gateway.port, spec.service[:_SERVICE_CHARS])


def shared_cores(spec: WorkerSpec, holders: Collection[CoreHolder] | None = None) -> tuple[SharedCores, ...]:
    """The cores of ``spec`` that other engines have claimed as well, by service. Workers of one oversubscribed service
    are expected to share cores, and do not count. ``holders`` are the claims (default: those on this host now)."""
    found: dict[SharedCores, set[int]] = {}
    for holder in core_holders() if holders is None else holders:
        own = is_of_service(holder, spec)
        if holder.core not in spec.cores or (own and spec.config.cluster.oversubscribe):
            continue
        if own and (holder.pid, holder.worker_id) == (os.getpid(), _printable(spec.worker_id)):
            continue  # the claim of ``spec`` itself
        uid = None if holder.uid == os.getuid() else holder.uid
        found.setdefault(SharedCores((), holder.port, uid, own), set()).add(holder.core)
    return tuple(replace(service, cores=tuple(sorted(cores))) for service, cores in found.items())


def sharing_note(shared: Mapping[str, Sequence[SharedCores]]) -> str:
    """A note of one line for the user about the cores that workers share, by worker id; empty if there are none."""
    by_service: dict[str, list[str]] = {}  # "" is the workers' own
    for worker_id, services in sorted(shared.items()):
        for each in services:
            service = "" if each.own else f"{each.port}" if each.uid is None else f"{each.port} of user {each.uid}"
            cores = f"core{'s' if len(each.cores) > 1 else ''} {', '.join(map(str, each.cores))}"
            by_service.setdefault(service, []).append(f"{worker_id} ({cores})")
    by_workers: dict[str, list[str]] = {}
    for service, workers in by_service.items():
        by_workers.setdefault(", ".join(workers), []).append(service)
    pairs = []
    for who, ports in by_workers.items():
        if others := sorted(filter(None, ports)):
            pairs.append(f"{who} with the service{'s' if len(others) > 1 else ''} on port {', '.join(others)}")
        if "" in ports:
            pairs.append(f"{who} with other workers of this service, {_WHY_OWN}")
    if not pairs:
        return ""
    remedy = "; end one of the services, or start it on other cores (taskset)" if any(by_service) else ""
    return f"engines that share cores slow each other down: {'; '.join(pairs)}{remedy}"


def leave_engine_cores(spec: WorkerSpec, holders: Collection[CoreHolder] | None = None) -> None:
    """Bind this process, with all its threads, to the cores that no engine of this host binds to, so that control and
    transfers never delay a step. Has no effect if every core has an engine. ``holders`` are the claims (default: all
    claims on this host)."""
    if spec.device != "cpu":
        return
    allowed = sorted(os.sched_getaffinity(0))
    if spare := spare_cores(spec, allowed, core_holders() if holders is None else holders):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(int(thread), spare)


def spare_cores(spec: WorkerSpec, allowed: Sequence[int], holders: Collection[CoreHolder]) -> list[int]:
    """The cores in ``allowed`` that no engine binds to: not claimed by ``holders``, and not going to be claimed by the
    workers that are expected on this host."""
    of_others = {holder.core for holder in holders if not is_of_service(holder, spec)}
    free = [core for core in allowed if core not in of_others]
    expected = free[: spec.num_slots * spec.num_cores]
    taken = {*of_others, *expected, *spec.cores, *(holder.core for holder in holders)}
    return [core for core in allowed if core not in taken]


def _names() -> list[str]:
    return _NAMES.read_text(encoding="utf-8", errors="replace").splitlines()


def _first_free(prefix: str, count: int) -> socket.socket | None:
    """A socket bound to the first free one of ``count`` numbered names; None if all are taken."""
    return next((claim for number in range(count) if (claim := _bind(f"{prefix}-{number}")) is not None), None)


def _bind(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{name}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _holder_name(spec: WorkerSpec, core: int) -> str:
    worker_id = _printable(spec.worker_id)
    service = spec.service[:_SERVICE_CHARS]
    return f"pdserve-holder-{core}-{os.getpid()}-{os.getuid()}-{spec.config.gateway.port}-{service}-{worker_id}"


def _printable(worker_id: str) -> str:
    return re.sub(r"[^\w.-]", "_", worker_id, flags=re.ASCII)[:_WORKER_CHARS]
