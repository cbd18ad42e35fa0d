"""The choice of transports: those that a worker offers, and the one that a pair of workers uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kv_transfer.base import KVTransport
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from kv_transfer.transports.shaped import SHAPEABLE, Shape, ShapedTransport
from pdserve.core.errors import ConfigError
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret

TRANSPORTS = ("shm", "cuda_ipc", "tcp", "grpc_stream", "torch_dist", "nixl")


def offered_transports(
    configured: str, *, device: str, shared_device: bool = False, shaped: bool = False
) -> tuple[str, ...]:
    """The transports that a worker on ``device`` (``cpu``, ``cuda``, ``cuda:0`` ...) offers, best first.

    ``configured`` is a transport's name or ``auto``, which never chooses nixl. ``shared_device``: workers may share a
    GPU, which NCCL does not support. ``shaped``: links are to be shaped, for which ``auto``
    chooses tcp. ConfigError if the configured transport cannot work on this device, or cannot be shaped; the check may
    take seconds."""
    cuda = device.startswith("cuda")
    if shaped:
        if configured == "auto":
            return ("tcp",)
        if configured in TRANSPORTS and (configured not in SHAPEABLE or (cuda and configured == "torch_dist")):
            raise ConfigError(
                f"transfer.shape_gbps, transfer.shape_round_trip_ms: {configured} moves payloads past the shaper in "
                "user space; use tcp or grpc_stream, or torch_dist on CPUs"
            )
    if configured == "auto":
        if not cuda:
            return ("shm", "tcp")
        nccl = () if shared_device or _backend_problem("nccl") is not None else ("torch_dist",)
        return ("cuda_ipc", *nccl, "tcp")
    if configured not in TRANSPORTS:
        raise ConfigError(f"transfer.transport: {configured!r} is unknown; known: auto, {', '.join(TRANSPORTS)}")
    if configured == "cuda_ipc" and not cuda:
        raise ConfigError(f"transfer.transport: cuda_ipc needs a GPU, and the device is {device}")
    if configured == "shm" and cuda:
        raise ConfigError("transfer.transport: shm reads host memory, and the pool is on a GPU; use auto")
    if configured == "torch_dist":
        if cuda and shared_device:
            raise ConfigError(
                "transfer.transport: torch_dist cannot be used: workers may share one GPU, which NCCL does not "
                "support; use auto (cuda_ipc within a GPU, tcp to others)"
            )
        if (problem := _backend_problem("nccl" if cuda else "gloo")) is not None:
            raise ConfigError(f"transfer.transport: torch_dist cannot be used: {problem}")
    if configured == "nixl":
        from kv_transfer.transports.nixl_agent import check_nixl

        check_nixl()
    return (configured,)


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that a pair uses, the peer's endpoint for it, and the reason, in words."""

    transport: KVTransport
    endpoint: KVEndpoint
    reason: str


def choose(transports: Sequence[KVTransport], endpoints: Sequence[KVEndpoint], peer: str) -> Choice:
    """The first of ``transports`` (best first) with which ``peer`` listens and can be reached. ConfigError if there is
    none."""
    against: list[str] = []
    for transport in transports:
        endpoint = next((each for each in endpoints if each.transport == transport.name), None)
        obstacle = f"{peer} does not listen with it" if endpoint is None else transport.obstacle(endpoint)
        if endpoint is not None and obstacle is None:
            best = "the fastest both ends have" if not against else f"not {'; not '.join(against)}"
            if len(transports) == 1:
                best = "the only one that is configured or possible here"
            return Choice(transport, endpoint, best + transport.note)
        against.append(f"{transport.name}: {obstacle}")
    offered = ", ".join(endpoint.transport for endpoint in endpoints)
    raise ConfigError(
        f"transfer.transport: no way to {peer}, which listens with {offered} ({'; '.join(against)}); "
        "all workers of a service need the same setting, and shm one host"
    )


def create_transport(
    name: str,
    memory: Memory,
    secret: ServiceSecret,
    *,
    tls: PlaneTls | None = None,
    timeout_s: float = 10.0,
    shape: Shape | None = None,
) -> KVTransport:
    """Create the transport ``name`` (from `offered_transports`) for a worker of the service with this ``secret`` whose
    pool lies in ``memory``. With ``tls``, links between hosts are encrypted, or refused by a transport that cannot.
    ``timeout_s`` bounds a send that makes no progress. ``shape``: that of its links, if they are to be shaped.
    ConfigError if the transport cannot be used here."""
    if shape is not None:
        offered_transports(name, device="cuda" if memory.on_device else "cpu", shaped=True)
        return ShapedTransport(create_transport(name, memory, secret, tls=tls, timeout_s=timeout_s), shape)
    # Imported here, because each transport needs its own libraries.
    if name == "shm" and isinstance(memory, HostMemory):
        from kv_transfer.transports.shm import ShmTransport

        return ShmTransport(memory, secret, timeout_s=timeout_s)
    if name == "cuda_ipc" and isinstance(memory, DeviceMemory):
        from kv_transfer.transports.cuda_ipc import CudaIpcTransport, gpu_of

        return CudaIpcTransport(memory, secret, gpu_of(memory), timeout_s=timeout_s)
    if name == "tcp":
        from kv_transfer.transports.tcp import TcpTransport

        return TcpTransport(memory, secret, tls=tls, timeout_s=timeout_s)
    if name == "grpc_stream":
        from kv_transfer.transports.grpc_stream import GrpcStreamTransport

        return GrpcStreamTransport(memory, secret, tls=tls, timeout_s=timeout_s)
    if name == "torch_dist":
        from kv_transfer.transports.torch_dist import TorchDistTransport

        offered_transports(name, device="cuda" if memory.on_device else "cpu")
        backend: Literal["nccl", "gloo"] = "nccl" if memory.on_device else "gloo"
        return TorchDistTransport(memory, secret, backend=backend, tls=tls, timeout_s=timeout_s)
    if name == "nixl":
        from kv_transfer.transports.nixl import NixlTransport

        return NixlTransport(memory, secret, tls=tls, timeout_s=timeout_s)
    raise ConfigError(f"transfer.transport: {name!r} cannot be used here; known: {', '.join(TRANSPORTS)}")


def _backend_problem(backend: str) -> str | None:
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"this build of torch has no {backend}"
    return None
