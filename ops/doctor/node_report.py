"""What a node says of itself: versions, model, devices, memory, clock."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.model.dtypes import NativeDtypes, native_dtypes
from engine.model.host_memory import available_bytes
from engine.model.source import resolve_model
from ops.doctor.source_hash import source_hash
from pdserve.core.clock import clock_id
from pdserve.core.errors import ModelError
from pdserve.version import VERSION
from worker.cores import CoreHolder, core_holders


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that torch sees."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """``cuda`` is the CUDA version that torch was built for (empty: a CPU build), ``source`` the hash of pdserve's own
    modules, ``model_hash`` that of the weights (empty if they cannot be hashed). ``model_error`` says why the model
    cannot be loaded, ``torch_error`` why torch, or its GPUs, cannot be used. ``memory_bytes`` is what a process may
    hope to get now. ``native`` is what its devices compute natively, by kind (``cpu``, ``cuda``). ``allowed_cores`` are
    the cores that processes may use there, ``held_cores`` those that workers have claimed."""

    host: str
    python: str
    torch: str
    cuda: str
    ray: str
    pdserve: str
    source: str
    model_hash: str
    model_error: str
    torch_error: str
    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    clock_id: str
    native: Mapping[str, tuple[NativeDtypes, ...]]
    allowed_cores: tuple[int, ...]
    held_cores: tuple[CoreHolder, ...]

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> NodeReport:
        """The report that `to_wire` described."""
        return cls(
            **{
                **data,
                "devices": tuple(Device(**each) for each in data["devices"]),
                "native": {
                    kind: tuple(NativeDtypes.from_wire(each) for each in found)
                    for kind, found in data["native"].items()
                },
                "allowed_cores": tuple(data["allowed_cores"]),
                "held_cores": tuple(CoreHolder(**each) for each in data["held_cores"]),
            }
        )


def report_versions(model: str) -> NodeReport:
    """All but what needs torch itself: that takes seconds to import, and a host without workers does without."""
    model_hash = model_error = ""
    try:
        model_hash = resolve_model(model).model_hash()
    except ModelError as error:
        model_error = str(error)
    return NodeReport(
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=_version("torch"),
        cuda="",
        ray=_version("ray"),
        pdserve=VERSION,
        source=source_hash(),
        model_hash=model_hash,
        model_error=model_error,
        torch_error="",
        devices=(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=available_bytes(),
        clock_id=clock_id(),
        native={"cpu": tuple(native_dtypes("cpu"))},
        allowed_cores=tuple(sorted(os.sched_getaffinity(0))),
        held_cores=tuple(core_holders()),
    )


def report_node(model: str) -> NodeReport:
    """Everything, of the node this runs on. Imports torch."""
    versions = report_versions(model)
    try:
        import torch
    except (ImportError, OSError) as error:
        return replace(versions, torch_error=f"torch cannot be imported: {_one_line(error)}")
    if not versions.model_error:
        versions = replace(versions, model_error=_weights_error(model))
    cuda = torch.version.cuda or ""
    try:
        devices = tuple(_device(index) for index in range(torch.cuda.device_count()))
        native = {**versions.native, "cuda": tuple(native_dtypes("cuda"))}
    except RuntimeError as error:
        return replace(versions, torch=torch.__version__, cuda=cuda, torch_error=_one_line(error))
    return replace(versions, torch=torch.__version__, cuda=cuda, devices=devices, native=native)


def _weights_error(model: str) -> str:
    """What would keep the engine from loading ``model``; empty if nothing can be seen without loading it."""
    from engine.model.loader import check_weights

    try:
        check_weights(resolve_model(model))
    except ModelError as error:
        return str(error)
    return ""


def _device(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return Device(torch.cuda.get_device_name(index), total, free)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
