"""`pdserve up` and `pdserve down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def up(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="configuration file (see `pdserve config`)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model folder, 'tiny', or 'dummy:…'")] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    oversubscribe: Annotated[bool, typer.Option("--oversubscribe", help="let workers share device slots")] = False,
    placement: Annotated[str | None, typer.Option(help="pack, spread or strict_spread")] = None,
    autoscale: Annotated[bool, typer.Option("--autoscale", help="ask Ray for nodes that are missing")] = False,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, shm, tcp, grpc_stream, torch_dist or nixl")] = None,
    port: Annotated[int | None, typer.Option(help="port of the gRPC API; 0 picks a free one")] = None,
    address: Annotated[str | None, typer.Option(help="'local' starts a Ray; 'auto' or host:port joins one")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once the service is ready")] = False,
) -> None:
    """Start the service on Ray: gateway, prefill and decode workers. Ctrl-C (or `pdserve down`) ends it."""
    from rich.console import Console

    from core.config import PdserveConfig

    overrides = {
        "model.path": model,
        "model.dtype": dtype,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "cluster.device": device,
        "cluster.oversubscribe": oversubscribe or None,
        "cluster.placement": placement,
        "cluster.autoscale": autoscale or None,
        "cluster.address": address,
        "transfer.transport": transport,
        "gateway.port": port,
    }
    settings = PdserveConfig.load(config, overrides)
    console = Console(stderr=True)

    def announce(ready_port: int) -> None:
        cluster = settings.cluster
        console.print(
            f"[green]ready[/]: {settings.model.path} on {cluster.prefill}P{cluster.decode}D at localhost:{ready_port}"
        )

    with console.status("starting") as status:
        if detach:
            from pdserve.launch.detach import start_detached

            announce(start_detached(settings, lambda stage: status.update(stage)))
            return
        from pdserve.launch.supervisor import supervise

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        def ready(ready_port: int) -> None:
            status.stop()
            announce(ready_port)
            console.print("Ctrl-C ends it")

        supervise(settings, report, ready)


def down(target: Annotated[str, typer.Option(help="host:port of the service")] = "localhost:50051") -> None:
    """Take down a service started on this host; nothing of it is left afterwards."""
    from rich.console import Console

    from pdserve.launch.detach import stop_detached
    from pdserve.launch.state import port_of

    port = port_of(target)
    console = Console(stderr=True)
    with console.status("stopping"):
        stop_detached(port)
    console.print(f"the service on port {port} is down")
