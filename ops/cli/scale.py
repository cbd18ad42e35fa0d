"""`pdserve scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli.options import TargetOption, progress, stderr_console
from pdserve.client.target import DEFAULT_TARGET

MARGIN_S = 60.0


def scale(
    prefill: Annotated[int | None, typer.Option(min=0, max=1024, help="new number of prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=1024, help="new number of decode workers")] = None,
    drain: Annotated[float, typer.Option(min=0, max=86_400, help="seconds for removed workers to finish")] = 30.0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="share device slots if none is free (CPUs only)")
    ] = False,
    target: TargetOption = DEFAULT_TARGET,
) -> None:
    """Add or remove workers of a running service, on the host it was started on. Where one role shrinks and the other
    grows, workers take the other role instead, at once and with the requests that they have. If no device slot is free,
    new workers wait for a node, which Ray is asked for. On a Ray that the service started itself this is an error,
    unless workers may share slots."""
    from ops.launch.operator import OperatorClient
    from ops.launch.state import ServiceState, port_of
    from pdserve.core.errors import LaunchError
    from pdserve.core.worker import Role

    wanted = {role: count for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)) if count is not None}
    if not wanted:
        raise LaunchError("give the new number of workers: --prefill N, --decode N, or both")
    state = ServiceState.read(port_of(target))
    console = stderr_console()
    timeout_s = drain + state.start_timeout_s + MARGIN_S
    with progress(console, "scaling") as report:
        scaled = OperatorClient(state.socket).scale(wanted, drain, timeout_s, report, oversubscribe)
    console.print(f"[green]scaled[/]: {scaled.prefill}P{scaled.decode}D at {target}")
    for worker_id, role in sorted(scaled.flipped.items()):
        console.print(f"{worker_id} is a {role} worker now")
    if scaled.waiting:
        console.print(
            f"[yellow]{', '.join(scaled.waiting)} wait for a node[/]: no device slot is free, and Ray was asked for a "
            "node (`ray status` shows the demand); they serve as soon as it has joined"
        )
