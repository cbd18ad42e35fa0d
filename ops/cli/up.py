"""`pdserve up` and `pdserve down`."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli.options import (
    DEFAULT_TARGET,
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
            from ops.launch.detach import start_detached

            announce(start_detached(settings, lambda stage: status.update(stage), note))
            return
        from ops.launch.supervisor import Interrupted, supervise

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        def ready(ready_port: int) -> None:
            status.stop()
            announce(ready_port)
            console.print("Ctrl-C ends it")

        try:
            supervise(settings, report, ready, note=note)
        except Interrupted as interrupted:
            console.print(str(interrupted))
            raise SystemExit(128 + interrupted.signum) from None


def down(
    target: Annotated[str, typer.Option(help="host:port of the service (see `pdserve list`)")] = DEFAULT_TARGET,
    drain: Annotated[
        float | None, typer.Option(min=0, max=86_400, help="seconds for requests in progress to finish [default: 30]")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="end requests in progress at once: --drain 0")] = False,
    every: Annotated[bool, typer.Option("--all", help="take down all of your services on this host")] = False,
) -> None:
    """Take down a service started on this host; nothing of it is left afterwards. New requests are refused at once,
    those in progress may finish."""
    from ops.cli.console import stderr_console
    from ops.launch.detach import stop_detached
    from ops.launch.shutdown import DRAIN_S
    from ops.launch.state import ServiceState, port_of
    from pdserve.core.errors import InvalidRequest, LaunchError

    if now and drain:
        raise InvalidRequest("--now and --drain say two things; give one of them")
    drain_s = 0.0 if now else DRAIN_S if drain is None else drain
    ports = [state.port for state in ServiceState.all()] if every else [port_of(target)]
    console = stderr_console()
    for port in ports:
        with console.status("stopping") as status:

            def report(stage: str) -> None:
                console.print(f"  {stage}")
                status.update(stage)

            try:
                stop_detached(port, drain_s, report)
            except LaunchError as error:
                if not every:
                    raise
                console.print(str(error))
                continue
        console.print(f"the service on port {port} is down")
    if not ports:
        console.print("no service of yours runs on this host")
