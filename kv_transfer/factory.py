"""Which transport moves the blocks: by configuration, or by what both ends share."""

from __future__ import annotations

from core.errors import ConfigError
from kv_transfer.base import KVTransport

TRANSPORTS = ("loopback", "grpc_stream", "torch_dist")


def choose_transport(
    configured: str, *, device: str, peer_device: str, same_process: bool = False, shared_device: bool = False
) -> tuple[str, str]:
    """The transport for two ends on ``device`` and ``peer_device`` (``cpu``, ``cuda``, ``cuda:0`` ...), and the reason
    in words. ``configured`` is ``auto`` or a transport's name; ConfigError if that one cannot work here.
    ``shared_device``: workers may share one GPU, which NCCL refuses."""
    both_cuda = device.startswith("cuda") and peer_device.startswith("cuda")
    if configured == "auto":
        if both_cuda and shared_device:
            return "grpc_stream", "both ends have CUDA devices, but may share one GPU, which NCCL refuses: grpc_stream"
        if both_cuda and _backend_problem("nccl") is None:
            return "torch_dist", "both ends have CUDA devices: torch_dist with NCCL"
        if both_cuda:
            return "grpc_stream", f"both ends have CUDA devices, but {_backend_problem('nccl')}: grpc_stream"
        return "grpc_stream", f"{device} here, {peer_device} at the peer: grpc_stream works between any two"
    if configured not in TRANSPORTS:
        raise ConfigError(f"transfer.transport: {configured!r} is unknown; known: auto, {', '.join(TRANSPORTS)}")
    if configured == "loopback" and not same_process:
        raise ConfigError("transfer.transport: loopback works only between workers of one process")
    if configured == "torch_dist":
        if device.startswith("cuda") != peer_device.startswith("cuda"):
            raise ConfigError(
                f"transfer.transport: torch_dist needs the same kind of device at both ends, not {device} and "
                f"{peer_device}"
            )
        if both_cuda and shared_device:
            raise ConfigError(
                "transfer.transport: torch_dist cannot be used: workers may share one GPU, which NCCL refuses; "
                "use auto or grpc_stream"
            )
        if (problem := _backend_problem("nccl" if both_cuda else "gloo")) is not None:
            raise ConfigError(f"transfer.transport: torch_dist cannot be used: {problem}")
    return configured, "set in the configuration"


def create_transport(name: str, *, device: str = "cpu", timeout_s: float = 10.0) -> KVTransport:
    """The transport ``name`` (not ``auto``: see `choose_transport`) for a worker on ``device``. ``timeout_s`` bounds
    one send to a peer that takes nothing. ConfigError if it cannot be used here."""
    if name == "loopback":
        from kv_transfer.transports.loopback import LoopbackTransport

        return LoopbackTransport(timeout_s=timeout_s)
    if name == "grpc_stream":
        from kv_transfer.transports.grpc_stream import GrpcStreamTransport

        return GrpcStreamTransport(timeout_s=timeout_s)
    if name == "torch_dist":
        from kv_transfer.transports.torch_dist import TorchDistTransport

        choose_transport(name, device=device, peer_device=device)
        return TorchDistTransport(backend="nccl" if device.startswith("cuda") else "gloo", timeout_s=timeout_s)
    raise ConfigError(f"transfer.transport: {name!r} is unknown; known: {', '.join(TRANSPORTS)}")


def _backend_problem(backend: str) -> str | None:
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"this build of torch has no {backend}"
    return None
