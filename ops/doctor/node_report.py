"""The doctor's report of one node: versions, model, devices, memory, and clock."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from checkpoints.draft import resolve_draft
from checkpoints.source import resolve_model
from ops.doctor.affinity import Affinity, affinity_of, pci_addresses
from pdserve.core.clock import clock_id
from pdserve.core.errors import ConfigError, ModelError
from pdserve.version import VERSION
from runtime.dtypes import NativeDtypes, native_dtypes
from runtime.host_memory import available_bytes
from runtime.mps import foreign_daemon, gpu_modes, mps_obstacle
from worker.cores import CoreHolder, core_holders

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("pdserve", "contract", "runtime", "checkpoints", "engine", "kv_transfer", "worker", "router"),
    *("prefill_worker", "decode_worker", "external_engines", "gateway", "ops"),
)


@cache
def source_hash(root: Path = ROOT) -> str:
    """Hash (16 hex digits) of the names and contents of pdserve's modules below ``root``. Unlike the version it also
    tells apart checkouts with local changes."""
    digest = xxhash.xxh3_64()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


_FLASHINFER = "flashinfer-python"
_FLASHINFER_CACHES = "flashinfer-jit-cache", "flashinfer-cubin"
"""Packages with its kernels, compiled."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int
    affinity: Affinity | None = None  # None: its PCI address is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a probe reports about its node."""

    host: str
    python: str
    torch: str
    cuda: str = ""  # the CUDA version of torch's build; empty: a CPU build
    ray: str
    pdserve: str
    source: str  # the hash of pdserve's modules
    model_hash: str  # of the weights; empty if they cannot be read
    model_error: str  # why the model cannot be loaded
    draft_error: str = ""  # the same of the draft model, if one is wanted
    torch_error: str = ""  # why torch or its GPUs cannot be used
    devices: tuple[Device, ...] = ()
    memory_bytes: int  # available to a process now
    clock_id: str
    native: Mapping[str, tuple[NativeDtypes, ...]]  # dtypes that devices compute natively, by kind (``cpu``, ``cuda``)
    allowed_cores: tuple[int, ...]  # that processes may use
    held_cores: tuple[CoreHolder, ...]  # the claims of running workers
    mps: str = ""  # why workers on GPUs cannot use MPS there; empty: they can, or there is no GPU
    triton_lacks: tuple[str, ...] = ()  # what Triton needs to compile kernels, if there is a GPU
    flashinfer_lacks: tuple[str, ...] = ()  # the same for FlashInfer, if it is installed
    server_command: str = ""  # the path of the program that starts servers of another engine; empty: not found


def report_versions(model: str, command: str = "", draft: str = "") -> NodeReport:
    """The report without the parts that need torch, which takes seconds to import. ``command`` starts servers of
    another engine (empty: none are started). ``draft`` is the draft model (empty: there is none)."""
    model_hash = model_error = draft_error = ""
    try:
        source = resolve_model(model, served=not command)
        model_hash = source.model_hash()
        if draft:
            resolve_draft(draft, source)
    except ModelError as error:
        model_error = str(error)
    except ConfigError as error:
        draft_error = str(error)
    return NodeReport(
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=_version("torch"),
        ray=_version("ray"),
        pdserve=VERSION,
        source=source_hash(),
        model_hash=model_hash,
        model_error=model_error,
        draft_error=draft_error,
        memory_bytes=available_bytes(),
        clock_id=clock_id(),
        native={"cpu": tuple(native_dtypes("cpu"))},
        allowed_cores=tuple(sorted(os.sched_getaffinity(0))),
        held_cores=tuple(core_holders()),
        server_command=(command and shutil.which(command)) or "",
    )


def report_node(model: str, command: str = "", draft: str = "") -> NodeReport:
    """The whole report of this node. Imports torch."""
    report = report_versions(model, command, draft)
    try:
        import torch
    except (ImportError, OSError) as error:
        return replace(report, torch_error=f"torch cannot be imported: {_one_line(error)}")
    from engine.model.loader import check_weights

    report = replace(report, torch=str(torch.__version__), cuda=torch.version.cuda or "")
    if not report.model_error and not command:
        try:
            check_weights(resolve_model(model))
        except ModelError as error:
            report = replace(report, model_error=str(error))
    devices = []
    try:
        addresses = pci_addresses(os.environ) if torch.cuda.device_count() else {}
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            address = addresses.get(str(torch.cuda.get_device_properties(index).uuid))
            place = None if address is None else affinity_of(address)
            devices.append(Device(torch.cuda.get_device_name(index), total, free, place))
        native = {**report.native, "cuda": tuple(native_dtypes("cuda"))}
    except RuntimeError as error:
        return replace(report, torch_error=_one_line(error))
    mps = ""
    if devices and foreign_daemon(os.environ) is None:
        mps = mps_obstacle(os.environ, gpu_modes(os.environ)) or ""
    report = replace(report, devices=tuple(devices), native=native, mps=mps)
    if devices:
        triton, flashinfer = missing_compilers(os.environ, _version)
        report = replace(report, triton_lacks=triton, flashinfer_lacks=flashinfer)
    return report


def missing_compilers(
    environment: Mapping[str, str], version_of: Callable[[str], str], headers: Path | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What slim images lack to compile kernels at the start of an engine, for Triton and for FlashInfer, with what
    installs it. ``version_of`` gives the version of a package (empty: it is not installed), ``headers`` is the folder
    of Python's (default: this Python's)."""
    path, triton, flashinfer = environment.get("PATH"), [], []
    compilers = (environment["CC"],) if environment.get("CC") else ("gcc", "clang", "cc")
    if not any(shutil.which(each, path=path) for each in compilers):
        triton.append("a C compiler (apt install gcc, or CC)")
    if not ((headers or Path(sysconfig.get_paths()["include"])) / "Python.h").exists():
        triton.append("Python.h (apt install python3-dev)")
    if version_of(_FLASHINFER) and not any(map(version_of, _FLASHINFER_CACHES)):
        home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
        if not shutil.which("nvcc", path=os.pathsep.join(filter(None, (path, f"{home}/bin")))):
            flashinfer.append("nvcc (the CUDA toolkit, or pip install flashinfer-jit-cache)")
        if not shutil.which("ninja", path=path):
            flashinfer.append("ninja (pip install ninja)")
    return tuple(triton), tuple(flashinfer)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
