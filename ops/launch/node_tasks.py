"""Calls of Ray that are waited for, and one task per node: what its devices compute natively, and downloads of the
model. Ray is imported by the functions that need it, since commands import this module without it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

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
Check = Callable[[], None]
Report = Callable[[str], None]
T = TypeVar("T")


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


def answers(asked: Mapping[Any, T], waiting: Callable[[list[T]], None]) -> Iterator[tuple[T, Any]]:
    """The answers of calls as they come, each with what ``asked`` has for the call; in place of an answer the RayError,
    if the call failed. ``waiting`` gets those that are missing, every moment, and may raise."""
    import ray

    left = dict(asked)
    while left:
        waiting(list(left.values()))
        done, _ = ray.wait(list(left), num_returns=1, timeout=CHECK_EVERY_S)
        for reference in done:
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayError as error:
                answer = error
            yield left.pop(reference), answer


def ask_nodes(
    nodes: Sequence[Node], function: Callable[[str], Any], argument: str, waiting: Callable[[list[str]], None]
) -> Iterator[tuple[str, Any]]:
    """Run ``function`` on each node, and give the node's address with its answer; see `answers`. At the end, and if
    ``waiting`` raises, tasks that still run are ended."""
    import ray

    # One call per process, because it may keep a GPU open afterwards.
    task: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(function)
    asked = {task.options(scheduling_strategy=on_node(node.node_id)).remote(argument): node.ip for node in nodes}
    try:
        yield from answers(asked, waiting)
    finally:
        # Only tasks that still run: Ray 2.60 ends this process if a task is cancelled whose answer has come, but whose
        # end it has not noted.
        _, running = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for reference in running:
            ray.cancel(reference, force=True)


def fetch_model(path: str, nodes: Sequence[Node], report: Report, check: Check = lambda: None) -> None:
    """Return once each of ``nodes`` has the model ``path`` (see `checkpoints.source.resolve_model`), which has no time
    limit. ``report`` gets the nodes that are waited for. ``check`` may raise, which ends the downloads. `ModelError` if
    a node cannot get the model, `LaunchError` if Ray cannot run the download there."""
    began_s = reported_s = time.monotonic()

    def waiting(hosts: list[str]) -> None:
        nonlocal reported_s
        check()
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_EVERY_S:
            reported_s = now_s
            report(f"waiting for {path} on {', '.join(hosts)} ({now_s - began_s:.0f} s)")

    for host, answer in ask_nodes(nodes, _fetch, path, waiting):
        if isinstance(answer, Exception):
            raise LaunchError(f"{host} could not look for the model: {one_line(answer)}")
        if answer:
            raise ModelError(f"on {host}: {answer}")


def _fetch(path: str) -> str:
    """Runs on a node. Returns what went wrong; empty if the model is there."""
    try:
        resolve_model(path, log.info, served=False)  # the launcher has checked what serves it
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
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S

    def waiting(hosts: list[str]) -> None:
        if time.monotonic() > deadline_s:
            silent.extend(hosts)
            raise TimeoutError

    with contextlib.suppress(TimeoutError):
        for host, answer in ask_nodes(nodes, _native_dtypes, device, waiting):
            if isinstance(answer, Exception):
                log.warning("%s did not report what it computes natively: %s", host, one_line(answer))
                silent.append(host)
            else:
                found.setdefault(host, []).extend(answer)  # several nodes may share an address
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
