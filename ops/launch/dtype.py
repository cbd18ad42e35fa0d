"""The dtype of a service, which all workers have to agree on. It is decided once, before any worker loads its model."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ops.launch.plan import Bundle, Node
from pdserve.core.config import PdserveConfig
from runtime.dtypes import DtypeChoice, NativeDtypes, choose_dtype, native_dtypes

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""How long a node may take to answer: a process starts there, and on GPUs imports torch."""


def service_dtype(
    config: PdserveConfig, checkpoint: str, device: str, nodes: Sequence[Node], local: bool
) -> DtypeChoice:
    """The dtype for workers on ``nodes``, given what their devices compute natively. ``local`` means that this host is
    the only node. Nodes that do not answer are ignored and named in the choice's note."""
    asked = config.model.dtype
    if "float32" in (asked, checkpoint if asked == "auto" else ""):
        return DtypeChoice("float32")  # native to every device
    if local and device == "cpu":
        return choose_dtype(asked, checkpoint, {"this host": native_dtypes(device)})
    found, silent = _ask(nodes, device)
    choice = choose_dtype(asked, checkpoint, found)
    if silent:
        left_out = f"model.dtype: {', '.join(silent)} did not report what they compute natively, and were ignored"
        return DtypeChoice(choice.dtype, "; ".join(filter(None, (choice.note, left_out))))
    return choice


def hosts_of(nodes: Sequence[Node], bundles: Mapping[Any, Bundle]) -> list[Node]:
    """The nodes that can hold a worker, now or after a restart, because they have the resources of some bundle."""
    return [node for node in nodes if any(_has(node, bundle) for bundle in bundles.values())]


def _has(node: Node, bundle: Bundle) -> bool:
    return all(node.resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def _native_dtypes(device: str) -> list[dict[str, Any]]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # set by Ray for tasks without GPUs
    return [each.to_wire() for each in native_dtypes(device)]


def _ask(nodes: Collection[Node], device: str) -> tuple[dict[str, list[NativeDtypes]], list[str]]:
    """What the devices of each node compute natively, by address; and the addresses that did not answer."""
    # One call per process, because it may keep a GPU open afterwards.
    task: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(_native_dtypes)
    asked: dict[Any, str] = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        asked[task.options(scheduling_strategy=on_node).remote(device)] = node.ip
    answered, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else ([], [])
    silent = [asked[reference] for reference in waiting]
    found: dict[str, list[NativeDtypes]] = {}
    for reference in answered:
        try:
            devices = [NativeDtypes.from_wire(each) for each in ray.get(reference)]
            found.setdefault(asked[reference], []).extend(devices)  # several nodes may share an address
        except ray.exceptions.RayError as error:
            log.warning("%s did not report what it computes natively: %s", asked[reference], error)
            silent.append(asked[reference])
    return found, silent
