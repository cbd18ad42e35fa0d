"""The services of this host: `pdserve up`, `down`, `scale` and `list`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.options import (
    HereOption,
    JsonOption,
    colored,
    fitted,
    print_json,
    print_note,
    progress,
    stderr_console,
    stdout_console,
    with_service_options,
)
from pdserve.client.target import DEFAULT_TARGET

if TYPE_CHECKING:
    from ops.launch.state import ServiceState
    from pdserve.core.config import PdserveConfig


@with_service_options
def up(
    settings: PdserveConfig,
    detach: Annotated[bool, typer.Option("--detach", help="return once the service is ready")] = False,
) -> None:
    """Start the service on Ray: gateway, prefill and decode workers. Ctrl-C (or `pdserve down`) ends it."""
    from rich.markup import escape

    console, began_s = stderr_console(), time.monotonic()

    def note(text: str) -> None:
        print_note(console, text)

    def announce(port: int) -> None:
        from ops.launch.state import ServiceState, target_here

        state, gateway = ServiceState.read(port), settings.gateway
        places = ",".join(state.targets)
        if http_port := gateway.served_http_port:
            scheme, numbers = "" if gateway.tls_cert else "http://", range(gateway.replicas)
            places += f" and {','.join(scheme + target_here(gateway, http_port + number) for number in numbers)}"
        took_s = time.monotonic() - began_s
        console.print(
            f"[green]ready[/]: {escape(state.model)} on {state.workers} at {places} ({took_s:.1f} s)", soft_wrap=True
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
    target: HereOption = DEFAULT_TARGET,
    drain: Annotated[
        float | None, typer.Option(min=0, max=86_400, help="seconds for requests in progress to finish [default: 30]")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="end requests in progress at once: --drain 0")] = False,
    every: Annotated[bool, typer.Option("--all", help="take down all of your services on this host")] = False,
) -> None:
    """Take down a service that was started on this host. New requests are refused at once; requests in progress may
    finish. Nothing of the service is left afterwards."""
    from rich.markup import escape

    from ops.launch.detach import stop_detached
    from ops.launch.shutdown import DRAIN_S
    from ops.launch.state import ServiceState
    from pdserve.core.errors import InvalidRequest, LaunchError

    if now and drain:
        raise InvalidRequest("--now and --drain contradict each other; give one of them")
    drain_s = 0.0 if now else DRAIN_S if drain is None else drain
    ports = [state.port for state in ServiceState.all()] if every else [ServiceState.of(target).port]
    console = stderr_console()
    for port in ports:
        try:
            with progress(console, "stopping") as report:
                ended = stop_detached(port, drain_s, report)
        except LaunchError as error:
            if not every:
                raise
            console.print(str(error))
            continue
        console.print(f"{escape(ended.model)} on {ended.workers} at {','.join(ended.targets)} is down", soft_wrap=True)
    if not ports:
        console.print("no service of yours runs on this host")


MARGIN_S = 60.0


def scale(
    prefill: Annotated[int | None, typer.Option(min=0, max=1024, help="new number of prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=1024, help="new number of decode workers")] = None,
    drain: Annotated[float, typer.Option(min=0, max=86_400, help="seconds for removed workers to finish")] = 30.0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="share device slots if none is free (CPUs only)")
    ] = False,
    prefill_url: Annotated[
        list[str] | None, typer.Option(help="running prefill server, of all that there should be; repeatable")
    ] = None,
    decode_url: Annotated[list[str] | None, typer.Option(help="the same for decode")] = None,
    target: HereOption = DEFAULT_TARGET,
) -> None:
    """Add or remove workers of a running service, on the host it was started on. Where one role shrinks and the other
    grows, workers take the other role instead, at once and with the requests that they have. If no device slot is free,
    new workers wait for a node, which Ray is asked for. On a Ray that the service started itself this is an error,
    unless workers may share slots.

    A service before servers of another engine (`pdserve up --prefill-url …`) gets the servers that you name."""
    from ops.launch.operator import request_scale
    from ops.launch.state import ServiceState
    from pdserve.core.errors import LaunchError
    from pdserve.pb import operator_pb2 as pb

    if prefill is None and decode is None and not prefill_url and not decode_url:
        raise LaunchError(
            "give the new number of workers (--prefill N, --decode N, or both), or the servers that there should be "
            "(--prefill-url URL, --decode-url URL)"
        )
    state = ServiceState.of(target)
    console = stderr_console()
    request = pb.ScaleRequest(
        prefill=prefill,
        decode=decode,
        drain_s=drain,
        oversubscribe=oversubscribe,
        prefill_urls=prefill_url or (),
        decode_urls=decode_url or (),
    )
    timeout_s = drain + state.start_timeout_s + MARGIN_S
    with progress(console, "scaling") as report:
        scaled = request_scale(state.socket, request, timeout_s, report)
    console.print(f"[green]scaled[/]: {scaled.prefill}P{scaled.decode}D at {','.join(state.targets)}")
    for worker_id, role in sorted(scaled.flipped.items()):
        console.print(f"{worker_id} is a {role} worker now")
    if scaled.waiting:
        console.print(
            f"[yellow]waiting for a node: {', '.join(scaled.waiting)}[/]; no device slot is free, and Ray was asked "
            "for a node (`ray status` shows the demand), on which they will serve"
        )


ASK_TIMEOUT_S = 2.0


def list_services(as_json: JsonOption = False) -> None:
    """Show your services on this host: running, starting, stopping, and killed ones that left something behind."""
    from ops.launch.state import ServiceState

    services = [_describe(state) for state in ServiceState.all()]
    if as_json:
        print_json({"services": services})
        return
    console = stdout_console()
    if not services:
        console.print("no service of yours runs on this host")
        return

    rows = [{**each, "pid": str(each["pid"]), "state": colored(each["state"])} for each in services]
    columns, less = ("target", "pid", "workers", "ray", "since"), ("ray", "since", "pid", "workers")
    console.print(fitted(console, rows, columns, (), less, ("model", "state")))
    if any(service["state"] == "killed" for service in services):
        console.print("[yellow]killed: `pdserve down --port …`, or the next `pdserve up`, removes the remains[/]")


def _describe(state: ServiceState) -> dict[str, Any]:
    from datetime import datetime

    since = datetime.fromtimestamp(state.since_s).astimezone()
    own = f"its own{f', {state.ray_address}' if state.ray_address else ''}"
    return {
        "target": ",".join(state.targets) if state.target else f"localhost:{state.port}",
        "port": state.port,
        "pid": state.pid,
        "model": state.model,
        "workers": state.workers,
        "state": _state(state),
        "ray": own if state.ray_folder else state.ray_address,
        "since": since.isoformat(sep=" ", timespec="seconds"),
        "log": state.log,
    }


def _state(state: ServiceState) -> str:
    if state.process() is None:
        return "killed"
    if state.phase != "ready":
        return state.phase
    from pdserve.client.sync_client import Client
    from pdserve.core.errors import PdserveError

    try:
        with Client(state.operator) as operator:
            return "ready" if operator.status(ASK_TIMEOUT_S).ready else "not ready"
    except PdserveError:
        return "not ready"
