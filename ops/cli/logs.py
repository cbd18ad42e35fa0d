"""`pdserve logs`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import JsonOption, TargetOption, print_json
from pdserve.client.target import DEFAULT_TARGET

if TYPE_CHECKING:
    from ops.launch.node_tasks import LogPart

FOLLOW_EVERY_S = 0.5


def logs(
    name: Annotated[
        str, typer.Argument(help="supervisor, gateway (gateway-1, … of several), or a worker such as prefill-0")
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="wait for further output and print it")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=1, help="print only the last lines")] = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Print the log of one part of the service, on the host it was started on. Without a name, list the logs and their
    paths."""
    from ops.launch.node_tasks import read_part
    from ops.launch.operator import SUPERVISOR, OperatorClient
    from ops.launch.state import ServiceState, port_of
    from pdserve.core.errors import InvalidRequest

    state = ServiceState.read(port_of(target))
    operator = OperatorClient(state.socket)
    if not name:
        _show(operator.logs() if state.process() else {SUPERVISOR: ("here", state.log)}, as_json)
        return
    if name == SUPERVISOR:
        if not state.log:
            raise InvalidRequest("the supervisor logs to the terminal it was started in; it has no file")
        _print(lambda _, offset: read_part(state.log, offset), follow, lines)
    else:
        _print(lambda path, offset: operator.read_log(name, path, offset), follow, lines)


def _show(found: dict[str, tuple[str, str]], as_json: bool) -> None:
    if as_json:
        print_json({"logs": [{"name": name, "node": node, "path": path} for name, (node, path) in found.items()]})
        return
    rows = [(name, node, path or "on its terminal") for name, (node, path) in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, node, path in rows:
        typer.echo(f"{name:<{widths[0]}}  {node:<{widths[1]}}  {path}")


def _print(read: Callable[[str, int], LogPart], follow: bool, lines: int | None) -> None:
    """Print the log, or its last ``lines``. With ``follow`` go on with new output, also after a change of files."""
    out = sys.stdout.buffer
    part = read("", 0)
    last: deque[bytes] = deque(maxlen=lines)
    rest = b""
    while part.data:
        if lines is None:
            out.write(part.data)
        else:
            *whole, rest = (rest + part.data).split(b"\n")
            last.extend(whole)
        part = read(part.path, part.offset)
    out.write(b"".join(line + b"\n" for line in last) + rest)
    out.flush()
    while follow:
        time.sleep(FOLLOW_EVERY_S)
        part = read(part.path, part.offset)
        out.write(part.data)
        out.flush()
