"""One Ray task per node: what workers compute natively, downloads of the model, and the logs of processes there.

Ray is imported by the functions that need it, since commands read logs without it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from checkpoints.source import resolve_model
from pdserve.core.errors import LaunchError, ModelError
from runtime.dtypes import DtypeChoice, NativeDtypes, choose_dtype, native_dtypes

if TYPE_CHECKING:
    from ops.launch.plan import Bundle, Node
    from pdserve.core.config import PdserveConfig

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.25
REPORT_EVERY_S = 10.0
ANSWER_TIMEOUT_S = 60.0
"""How long a node may take to answer: a process starts there, and on GPUs imports torch."""
PART_BYTES = 256 * 1024
READ_TIMEOUT_S = 30.0
Check = Callable[[], None]


def one_line(error: BaseException) -> str:
    """The last line of a Ray error, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def on_node(node_id: str) -> Any:
    """The scheduling strategy of a task or actor that runs on this node, and on no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def show_gpus() -> None:
    """Undo that Ray hides the GPUs from tasks and actors that ask for none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]


def ask_nodes(
    nodes: Sequence[Node],
    function: Callable[[str], Any],
    argument: str,
    waiting: Callable[[list[str], float], None],
    check: Check = lambda: None,
) -> Iterator[tuple[str, Any]]:
    """Run ``function`` on each node, and give the node's address with its answer, or with the RayError instead of one.
    ``waiting`` gets the addresses that have not answered after so many seconds, and ``check`` is called, every moment;
    either may raise, which ends the tasks."""
    import ray

    # One call per process, because it may keep a GPU open afterwards.
    task: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(function)
    asked = {task.options(scheduling_strategy=on_node(node.node_id)).remote(argument): node.ip for node in nodes}
    began_s = time.monotonic()
    try:
        while asked:
            check()
            done, _ = ray.wait(list(asked), num_returns=1, timeout=CHECK_EVERY_S)
            for reference in done:
                address = asked.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as error:
                    answer = error
                yield address, answer
            if asked:
                waiting(list(asked.values()), time.monotonic() - began_s)
    finally:
        for reference in asked:
            ray.cancel(reference, force=True)


def fetch_model(path: str, nodes: Sequence[Node], report: Callable[[str], None], check: Check = lambda: None) -> None:
    """Return once each of ``nodes`` has the model ``path`` (see `checkpoints.source.resolve_model`), which has no time
    limit. ``report`` gets the nodes that are waited for. ``check`` may raise, which ends the downloads. `ModelError` if
    a node cannot get the model, `LaunchError` if Ray cannot run the download there."""
    reported_s = 0.0

    def waiting(hosts: list[str], waited_s: float) -> None:
        nonlocal reported_s
        if waited_s - reported_s >= REPORT_EVERY_S:
            reported_s = waited_s
            report(f"waiting for {path} on {', '.join(hosts)} ({waited_s:.0f} s)")

    for host, answer in ask_nodes(nodes, _fetch, path, waiting, check):
        if isinstance(answer, Exception):
            raise LaunchError(f"{host} could not look for the model: {one_line(answer)}")
        if answer:
            raise ModelError(f"on {host}: {answer}")


def _fetch(path: str) -> str:
    """Runs on a node. Returns what went wrong; empty if the model is there."""
    try:
        resolve_model(path, log.info)
    except ModelError as error:
        return str(error)
    return ""


def service_dtype(
    config: PdserveConfig, checkpoint: str, device: str, nodes: Sequence[Node], local: bool
) -> DtypeChoice:
    """The dtype for workers on ``nodes``, given what their devices compute natively. All workers have to agree on it,
    so it is decided before any of them loads its model. ``local`` means that this host is the only node. Nodes that do
    not answer are ignored and named in the choice's note."""
    asked = config.model.dtype
    if "float32" in (asked, checkpoint if asked == "auto" else ""):
        return DtypeChoice("float32")  # native to every device
    if local and device == "cpu":
        return choose_dtype(asked, checkpoint, {"this host": native_dtypes(device)})
    found: dict[str, list[NativeDtypes]] = {}
    silent: list[str] = []

    def waiting(hosts: list[str], waited_s: float) -> None:
        if waited_s > ANSWER_TIMEOUT_S:
            raise TimeoutError(hosts)

    try:
        for host, answer in ask_nodes(nodes, _native_dtypes, device, waiting):
            if isinstance(answer, Exception):
                log.warning("%s did not report what it computes natively: %s", host, one_line(answer))
                silent.append(host)
            else:
                found.setdefault(host, []).extend(answer)  # several nodes may share an address
    except TimeoutError as late:
        silent += late.args[0]
    choice = choose_dtype(asked, checkpoint, found)
    if silent:
        left_out = f"model.dtype: {', '.join(silent)} did not report what they compute natively, and were ignored"
        return DtypeChoice(choice.dtype, "; ".join(filter(None, (choice.note, left_out))))
    return choice


def _native_dtypes(device: str) -> list[NativeDtypes]:
    show_gpus()
    return native_dtypes(device)


def hosts_of(nodes: Sequence[Node], bundles: Mapping[Any, Bundle]) -> list[Node]:
    """The nodes that can hold a worker, now or after a restart, because they have the resources of some bundle."""
    return [
        node
        for node in nodes
        if any(all(node.resources.get(k, 0.0) >= v for k, v in bundle.items()) for bundle in bundles.values())
    ]


class ProcessPlace(NamedTuple):
    """A process of Ray: its node (Ray's id and address) and its process id."""

    node_id: str
    node: str
    pid: int


class LogPart(NamedTuple):
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
    """The log file of ``process`` on its node, to which Ray writes its output; empty if there is none. LaunchError if
    the node does not answer."""
    return str(_there(process, _find_log, process.pid))


def read_log(process: ProcessPlace, path: str, offset: int) -> LogPart:
    """The part of the log of ``process`` at ``offset``, or its first part if the log is not at ``path`` (any more).
    LaunchError if the node does not answer, or the log cannot be read."""
    found = log_path(process)
    return LogPart(*_there(process, read_part, found, offset if path == found else 0))


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
