"""Logs of gateway and workers. Ray writes the output of a process to a file on its node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ops.launch.ray_session import one_line
from pdserve.core.errors import LaunchError

PART_BYTES = 256 * 1024
READ_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """A process of Ray: its node (Ray's id and address) and its process id."""

    node_id: str
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class LogPart:
    """Bytes of the log file at ``path``, and the offset at which the next part begins."""

    data: bytes
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A log file on a node."""

    node_id: str
    node: str
    path: str


def locate(actor: Any) -> ProcessPlace | None:
    """The process of an actor; None while it has none."""
    known = actors(actor._actor_id.hex())
    if not known or known["State"] != "ALIVE":
        return None
    return ProcessPlace(known["Address"]["NodeID"], known["Address"]["IPAddress"], known["Pid"])


def log_of(place: ProcessPlace) -> LogPlace:
    """The log file of a process."""
    return LogPlace(place.node_id, place.node, _on_node(place.node_id, path_of, place.pid))


def read_part(place: LogPlace, path: str, offset: int) -> LogPart:
    """The part of the log at ``offset``, or its first part if the log is no longer at ``path``."""
    offset = offset if path == place.path else 0
    data: bytes = _on_node(place.node_id, read_bytes, place.path, offset)
    return LogPart(data, place.path, offset + len(data))


def path_of(pid: int) -> str:
    """The file that Ray writes the output of process ``pid`` to; empty if there is none. Runs on its node."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return next((str(path) for path in folder.glob(f"worker-*-{pid}.err")), "")


def read_bytes(path: str, offset: int) -> bytes:
    """A part of a file. Runs on the file's node."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _on_node(node_id: str, function: Any, *arguments: Any) -> Any:
    """Call ``function`` on a node, by a Ray task unless it is this node. LaunchError if that fails."""
    try:
        if node_id == ray.get_runtime_context().get_node_id():
            return function(*arguments)
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        return ray.get(task.remote(*arguments), timeout=READ_TIMEOUT_S)
    except (OSError, ray.exceptions.RayError) as error:
        raise LaunchError(f"cannot read the log on its node: {one_line(error)}") from None
