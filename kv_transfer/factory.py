"""The choice of transports: those that a worker offers, and the one that a pair of workers uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from kv_transfer.base import KVTransport
from kv_transfer.memory import Memory
from kv_transfer.transports.shaped import SHAPEABLE, Shape, ShapedLink
from pdserve.core import plugins
from pdserve.core.errors import ConfigError
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret

_CLASSES = {
    "shm": ("unix_socket", "ShmTransport"),
    "cuda_ipc": ("unix_socket", "CudaIpcTransport"),
    "tcp": ("tcp", "TcpTransport"),
    "grpc_stream": ("grpc_stream", "GrpcStreamTransport"),
    "torch_dist": ("torch_dist", "TorchDistTransport"),
    "nixl": ("nixl", "NixlTransport"),
}
TRANSPORTS = tuple(_CLASSES)
"""pdserve's own. Plug-ins add others."""


def offered_transports(
    configured: str, *, device: str, shared_device: bool = False, shaped: bool = False
) -> tuple[str, ...]:
    """The transports that a worker on ``device`` (``cpu``, ``cuda``, ``cuda:0`` ...) offers, best first.

    ``configured`` is a transport's name or ``auto``, which chooses neither nixl nor a plug-in. ``shared_device``:
    workers may share a GPU, which NCCL does not support. ``shaped``: links are to be shaped, for which ``auto`` chooses
    tcp. ConfigError if the configured transport cannot work on this device, or cannot be shaped; the check may take
    seconds."""
    cuda, known = device.startswith("cuda"), plugins.names(plugins.TRANSPORTS, TRANSPORTS)
    if shaped:
        if configured == "auto":
            return ("tcp",)
        if configured in known and (configured not in SHAPEABLE or (cuda and configured == "torch_dist")):
            raise ConfigError(
                f"transfer.shape_gbps, transfer.shape_round_trip_ms: {configured} moves payloads past the shaper in "
                "user space; use tcp or grpc_stream, or torch_dist on CPUs"
            )
    if configured == "auto":
        if not cuda:
            return ("shm", "tcp")
        nccl = () if shared_device or _backend_problem("nccl") is not None else ("torch_dist",)
        return ("cuda_ipc", *nccl, "tcp")
    if configured not in known:
        raise ConfigError(f"transfer.transport: {configured!r} is unknown; known: auto, {', '.join(known)}")
    if configured not in TRANSPORTS:
        _class_of(configured)
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


def choose(
    transports: Sequence[KVTransport], endpoints: Sequence[KVEndpoint], peer: str
) -> tuple[KVTransport, KVEndpoint, str]:
    """The first of ``transports`` (best first) with which ``peer`` listens and can be reached, its endpoint, and the
    reason in words. ConfigError if there is none."""
    against: list[str] = []
    for transport in transports:
        endpoint = next((each for each in endpoints if each.transport == transport.name), None)
        obstacle = f"{peer} does not listen with it" if endpoint is None else transport.obstacle(endpoint)
        if endpoint is not None and obstacle is None:
            best = "the fastest both ends have" if not against else f"not {'; not '.join(against)}"
            if len(transports) == 1:
                best = "the only one that is configured or possible here"
            return transport, endpoint, best + transport.note
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
    on_device, known = memory.on_device, plugins.names(plugins.TRANSPORTS, TRANSPORTS)
    if name not in known or name == ("shm" if on_device else "cuda_ipc"):
        raise ConfigError(f"transfer.transport: {name!r} cannot be used here; known: {', '.join(known)}")
    if shape is not None or name == "torch_dist":
        offered_transports(name, device="cuda" if on_device else "cpu", shaped=shape is not None)
    transport: KVTransport = _class_of(name)(memory, secret, tls=tls, timeout_s=timeout_s)
    if shape is not None:
        transport.note += f", shaped in user space: {shape}"
        transport.wrap = lambda link: ShapedLink(link, shape)
    return transport


def _class_of(name: str) -> Callable[..., KVTransport]:
    """The class of a transport, imported here, because each needs its own libraries. ConfigError if that of a plug-in
    cannot be imported."""
    if name not in _CLASSES:
        found: type[KVTransport] = plugins.load(plugins.TRANSPORTS, name, KVTransport)
        return found
    module, kind = _CLASSES[name]
    own: type[KVTransport] = getattr(import_module(f"kv_transfer.transports.{module}"), kind)
    return own


def _backend_problem(backend: str) -> str | None:
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"this build of torch has no {backend}"
    return None
