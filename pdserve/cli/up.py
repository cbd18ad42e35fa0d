"""`pdserve up` and `pdserve down`."""

from __future__ import annotations

from typing import Annotated

import typer

from pdserve.cli.options import (
    AddressOption,
    AutoscaleOption,
    ConfigOption,
    DecodeOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    NodesOption,
    OversubscribeOption,
    PlacementOption,
    PortOption,
    PrefillOption,
    TransportOption,
    service_settings,
)


def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    device: DeviceOption = None,
    oversubscribe: OversubscribeOption = False,
    placement: PlacementOption = None,
    nodes: NodesOption = None,
    autoscale: AutoscaleOption = False,
    dtype: DtypeOption = None,
    transport: TransportOption = None,
    port: PortOption = None,
    address: AddressOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once the service is ready")] = False,
) -> None:
    """Start the service on Ray: gateway, prefill and decode workers. Ctrl-C (or `pdserve down`) ends it."""
    from rich.console import Console
    from rich.markup import escape

    settings = service_settings(
        config,
        model=model,
        prefill=prefill,
        decode=decode,
        device=device,
        oversubscribe=oversubscribe,
        placement=placement,
        nodes=nodes,
        autoscale=autoscale,
        dtype=dtype,
        transport=transport,
        port=port,
        address=address,
    )
    console = Console(stderr=True)

    def announce(ready_port: int) -> None:
        cluster = settings.cluster
        console.print(
            f"[green]ready[/]: {settings.model.path} on {cluster.prefill}P{cluster.decode}D at localhost:{ready_port}"
        )

    def note(text: str) -> None:
        console.print("[yellow]note[/]:", escape(text), soft_wrap=True)

    with console.status("starting") as status:
        if detach:
            from pdserve.launch.detach import start_detached

            announce(start_detached(settings, lambda stage: status.update(stage), note))
            return
        from pdserve.launch.supervisor import supervise

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        def ready(ready_port: int) -> None:
            status.stop()
            announce(ready_port)
            console.print("Ctrl-C ends it")

        supervise(settings, report, ready, note=note)


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
