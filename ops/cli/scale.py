"""`pdserve scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli.options import DEFAULT_TARGET, TargetOption

MARGIN_S = 60.0


def scale(
    prefill: Annotated[int | None, typer.Option(min=0, max=1024, help="prefill workers there should be")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=1024, help="decode workers there should be")] = None,
    drain: Annotated[float, typer.Option(min=0, max=86_400, help="seconds for workers that go to finish")] = 30.0,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="workers that find no free slot share one (CPUs only)")
    ] = False,
    target: TargetOption = DEFAULT_TARGET,
) -> None:
    """Add or remove workers of a running service, on the host it was started on. Workers that find no free slot wait
    for a node, which Ray is asked for; on a Ray of the service's own that is an error, unless they may share slots."""
    from ops.cli.console import stderr_console
    from ops.launch.operator import OperatorClient
    from ops.launch.state import ServiceState, port_of
    from pdserve.core.errors import LaunchError
    from pdserve.core.worker import Role

    wanted = {role: count for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)) if count is not None}
    if not wanted:
        raise LaunchError("say how many workers there should be: --prefill N, --decode N, or both")
    state = ServiceState.read(port_of(target))
    console = stderr_console()
    with console.status("scaling") as status:

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        timeout_s = drain + state.start_timeout_s + MARGIN_S
        scaled = OperatorClient(state.socket).scale(wanted, drain, timeout_s, report, oversubscribe)
    console.print(f"[green]scaled[/]: {scaled.prefill}P{scaled.decode}D at {target}")
    if scaled.waiting:
        console.print(
            f"[yellow]{', '.join(scaled.waiting)} wait for a node[/]: no free slot is left, and Ray has been asked for "
            "one (`ray status` shows the demand); they serve as soon as there is one"
        )
