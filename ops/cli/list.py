"""`pdserve list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.cli.options import JsonOption, fitted, plain_table, print_json, stdout_console

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.table import Table

    from ops.launch.state import ServiceState

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

    def table(left_out: Collection[str]) -> Table:
        columns = [name for name in ("target", "pid", "model", "workers", "state", "ray", "since")
                   if name not in left_out]  # fmt: skip
        made = plain_table(columns)
        for name in ("model", "state"):
            made.columns[columns.index(name)].no_wrap = False
            made.columns[columns.index(name)].overflow = "fold"
        for service in services:
            color = {"ready": "green", "killed": "red"}.get(service["state"], "yellow")
            shown = {**service, "pid": str(service["pid"]), "state": f"[{color}]{service['state']}[/]"}
            made.add_row(*(shown[name] for name in columns))
        return made

    console.print(fitted(console, table, ("ray", "since", "pid", "workers")))
    if any(service["state"] == "killed" for service in services):
        console.print("[yellow]killed: `pdserve down --target …`, or the next `pdserve up`, removes the remains[/]")


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
