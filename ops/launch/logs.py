"""The logs of a service's processes, which Ray keeps on their nodes. Ray is imported by the functions that need it,
since commands read the supervisor's log without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ops.launch.node_tasks import on_node, one_line
from pdserve.core.errors import LaunchError
from pdserve.pb import operator_pb2 as pb

PART_BYTES = 256 * 1024
READ_TIMEOUT_S = 30.0


class ProcessPlace(NamedTuple):
    """A process of Ray."""

    node_id: str
    node: str  # its address
    pid: int


def locate(actor: Any) -> ProcessPlace | None:
    """The process of an actor; None while it has none."""
    from ray._private.state import actors

    known = actors(actor._actor_id.hex())
    if not known or known["State"] != "ALIVE":
        return None
    return ProcessPlace(known["Address"]["NodeID"], known["Address"]["IPAddress"], known["Pid"])


def log_path(process: ProcessPlace) -> str:
    """The log file of ``process`` on its node, to which Ray writes its output; empty if there is none. LaunchError if
    the node does not answer."""
    return str(_there(process, _find_log, process.pid))


def read_log(process: ProcessPlace, path: str, offset: int) -> pb.ReadLogResponse:
    """The part of the log of ``process`` at ``offset``, or its first part if the log is not at ``path`` (any more).
    LaunchError if the node does not answer, or the log cannot be read."""
    found = log_path(process)
    part: pb.ReadLogResponse = _there(process, read_part, found, offset if path == found else 0)
    return part


def read_part(path: str, offset: int) -> pb.ReadLogResponse:
    """The part of a file of this host at ``offset``, at most `PART_BYTES`. OSError if it cannot be read."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(PART_BYTES)
    return pb.ReadLogResponse(data=data, path=path, offset=offset + len(data))


def _find_log(pid: int) -> str:
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return next((str(path) for path in folder.glob(f"worker-*-{pid}.err")), "")


def _there(process: ProcessPlace, function: Any, *arguments: Any) -> Any:
    """Call ``function`` on the node of ``process``, by a Ray task unless it is this node. LaunchError if that fails."""
    import ray

    try:
        if process.node_id == ray.get_runtime_context().get_node_id():
            return function(*arguments)
        task = ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=on_node(process.node_id))
        return ray.get(task.remote(*arguments), timeout=READ_TIMEOUT_S)
    except (OSError, ray.exceptions.RayError) as error:
        raise LaunchError(f"cannot read the log on its node: {one_line(error)}") from None
