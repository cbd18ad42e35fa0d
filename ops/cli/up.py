"""`pdserve up` and `pdserve down`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import print_note, progress, stderr_console, with_service_options
from pdserve.client.target import DEFAULT_TARGET

if TYPE_CHECKING:
    from pdserve.core.config import PdserveConfig


@with_service_options
def up(
    settings: PdserveConfig,
    detach: Annotated[bool, typer.Option("--detach", help="return once the service is ready")] = False,
) -> None:
    """Start the service on Ray: gateway, prefill and decode workers. Ctrl-C (or `pdserve down`) ends it."""
    console, began_s = stderr_console(), time.monotonic()

    def note(text: str) -> None:
        print_note(console, text)

    def announce(port: int) -> None:
        from ops.launch.state import target_here

        cluster, gateway = settings.cluster, settings.gateway
        also = ""
        numbers = range(gateway.replicas)
        if http_port := gateway.served_http_port:
            scheme = "" if gateway.tls_cert else "http://"
            also = f" and {','.join(scheme + target_here(gateway, http_port + number) for number in numbers)}"
        console.print(
            f"[green]ready[/]: {settings.model.path} on {cluster.prefill}P{cluster.decode}D at "
            f"{','.join(target_here(gateway, port + number) for number in numbers)}{also} "
            f"({time.monotonic() - began_s:.1f} s)",
            soft_wrap=True,
        )

    with console.status("starting") as status:

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        if detach:
            from ops.launch.detach import start_detached

            announce(start_detached(settings, report, note))
            return
        from ops.launch.shutdown import StartCancelled
        from ops.launch.supervisor import supervise

        def on_ready(port: int) -> None:
            status.stop()
            announce(port)
            console.print("press Ctrl-C to end it")

        try:
            supervise(settings, report, on_ready, note=note)
        except StartCancelled as cancelled:
            if not cancelled.signum:
                raise
            console.print(str(cancelled))
            raise SystemExit(128 + cancelled.signum) from None


def down(
    target: Annotated[str, typer.Option(help="host:port of the service (see `pdserve list`)")] = DEFAULT_TARGET,
    drain: Annotated[
        float | None, typer.Option(min=0, max=86_400, help="seconds for requests in progress to finish [default: 30]")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="end requests in progress at once: --drain 0")] = False,
    every: Annotated[bool, typer.Option("--all", help="take down all of your services on this host")] = False,
) -> None:
    """Take down a service that was started on this host. New requests are refused at once; requests in progress may
    finish. Nothing of the service is left afterwards."""
    from ops.launch.detach import stop_detached
    from ops.launch.shutdown import DRAIN_S
    from ops.launch.state import ServiceState, port_of
    from pdserve.core.errors import InvalidRequest, LaunchError

    if now and drain:
        raise InvalidRequest("--now and --drain contradict each other; give one of them")
    drain_s = 0.0 if now else DRAIN_S if drain is None else drain
    ports = [state.port for state in ServiceState.all()] if every else [port_of(target)]
    console = stderr_console()
    for port in ports:
        try:
            with progress(console, "stopping") as report:
                stop_detached(port, drain_s, report)
        except LaunchError as error:
            if not every:
                raise
            console.print(str(error))
            continue
        console.print(f"the service on port {port} is down")
    if not ports:
        console.print("no service of yours runs on this host")
