"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdserve.core.config import PdserveConfig

TargetOption = Annotated[str, typer.Option("--target", help="host:port of the service")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on one line instead")]

DEFAULT_TARGET = "localhost:50051"

# What `up` takes, and `doctor` to examine the same.
ConfigOption = Annotated[Path | None, typer.Option("-c", "--config", help="configuration file (see `pdserve config`)")]
ModelOption = Annotated[str | None, typer.Option(help="model folder, 'tiny', or 'dummy:…'")]
PrefillOption = Annotated[int | None, typer.Option(help="prefill workers")]
DecodeOption = Annotated[int | None, typer.Option(help="decode workers")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda")]
OversubscribeOption = Annotated[bool, typer.Option("--oversubscribe", help="let workers share device slots")]
PlacementOption = Annotated[str | None, typer.Option(help="pack, spread or strict_spread")]
NodesOption = Annotated[int | None, typer.Option(help="wait for this many nodes of a Ray that is joined")]
AutoscaleOption = Annotated[bool, typer.Option("--autoscale", help="ask Ray for nodes that are missing")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16")]
TransportOption = Annotated[str | None, typer.Option(help="auto, shm, tcp, grpc_stream, torch_dist or nixl")]
PortOption = Annotated[int | None, typer.Option(help="port of the gRPC API; 0 picks a free one")]
AddressOption = Annotated[str | None, typer.Option(help="'local' starts a Ray; 'auto' or host:port joins one")]


def service_settings(
    config: Path | None,
    *,
    model: str | None,
    prefill: int | None,
    decode: int | None,
    device: str | None,
    oversubscribe: bool,
    placement: str | None,
    nodes: int | None,
    autoscale: bool,
    dtype: str | None,
    transport: str | None,
    port: int | None,
    address: str | None,
) -> PdserveConfig:
    """The configuration file with those options on top that were given."""
    from pdserve.core.config import PdserveConfig

    overrides = {
        "model.path": model,
        "model.dtype": dtype,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "cluster.device": device,
        "cluster.oversubscribe": oversubscribe or None,
        "cluster.placement": placement,
        "cluster.nodes": nodes,
        "cluster.autoscale": autoscale or None,
        "cluster.address": address,
        "transfer.transport": transport,
        "gateway.port": port,
    }
    return PdserveConfig.load(config, overrides)
