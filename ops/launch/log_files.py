"""The logs of gateway and workers. Ray writes the output of a process to a file on its node. Ray is imported by those
functions that need it, since commands show logs without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """At most `PART_BYTES` of the log file at ``path``, and the offset at which the next part begins."""

    data: bytes
    path: str
    offset: int


def locate(actor: Any) -> ProcessPlace | None:
    """The process of an actor; None while it has none."""
    from ray._private.state import actors

    known = actors(actor._actor_id.hex())
    if not known or known["State"] != "ALIVE":
        return None
    return ProcessPlace(known["Address"]["NodeID"], known["Address"]["IPAddress"], known["Pid"])


def log_path(process: ProcessPlace) -> str:
    """The log file of ``process`` on its node; empty if there is none. LaunchError if the node does not answer."""
    path: str = _on_node(process.node_id, _find_log, process.pid)
    return path


def read_log(process: ProcessPlace, path: str, offset: int) -> LogPart:
    """The part of the log of ``process`` at ``offset``, or its first part if the log is not at ``path`` (any more).
    LaunchError if the node does not answer, or the log cannot be read."""
    log = log_path(process)
    part: LogPart = _on_node(process.node_id, read_part, log, offset if path == log else 0)
    return part


def read_part(path: str, offset: int) -> LogPart:
    """The part of a file of this host at ``offset``. OSError if it cannot be read."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(PART_BYTES)
    return LogPart(data, path, offset + len(data))


def _find_log(pid: int) -> str:
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return next((str(path) for path in folder.glob(f"worker-*-{pid}.err")), "")


def _on_node(node_id: str, function: Any, *arguments: Any) -> Any:
    """Call ``function`` on a node, by a Ray task unless it is this node. LaunchError if that fails."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ops.launch.ray_session import one_line

    try:
        if node_id == ray.get_runtime_context().get_node_id():
            return function(*arguments)
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        return ray.get(task.remote(*arguments), timeout=READ_TIMEOUT_S)
    except (OSError, ray.exceptions.RayError) as error:
        raise LaunchError(f"cannot read the log on its node: {one_line(error)}") from None
