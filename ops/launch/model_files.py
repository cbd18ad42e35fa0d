"""A model of the Hugging Face Hub on the hosts of a cluster: each downloads it into its own cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from checkpoints.source import resolve_model
from ops.launch.plan import Node
from ops.launch.ray_session import one_line
from pdserve.core.errors import LaunchError, ModelError

CHECK_EVERY_S = 0.25
REPORT_EVERY_S = 10.0


def fetch_model(
    path: str, nodes: Sequence[Node], report: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> None:
    """Return once each of ``nodes`` has the model ``path`` (see `checkpoints.source.resolve_model`), which has no time
    limit. ``report`` gets the nodes that are waited for. ``check`` is called every moment and may raise, which ends the
    downloads. `ModelError` if a node cannot get the model, `LaunchError` if Ray cannot run the download there."""
    task: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(_fetch)
    waiting: dict[Any, str] = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        waiting[task.options(scheduling_strategy=on_node).remote(path)] = node.ip
    began_s = reported_s = time.monotonic()
    try:
        while waiting:
            check()
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=CHECK_EVERY_S)
            for reference in done:
                host = waiting.pop(reference)
                if error := _answer(reference, host):
                    raise ModelError(f"on {host}: {error}")
            if waiting and time.monotonic() - reported_s >= REPORT_EVERY_S:
                reported_s = time.monotonic()
                report(f"waiting for {path} on {', '.join(waiting.values())} ({reported_s - began_s:.0f} s)")
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _fetch(path: str) -> str:
    """Runs on a node. Returns what went wrong; empty if the model is there."""
    try:
        resolve_model(path, logging.getLogger(__name__).info)
    except ModelError as error:
        return str(error)
    return ""


def _answer(reference: Any, host: str) -> str:
    try:
        return str(ray.get(reference))
    except ray.exceptions.RayError as error:
        raise LaunchError(f"{host} could not look for the model: {one_line(error)}") from None
