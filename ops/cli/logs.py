"""`pdserve logs`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import HereOption, JsonOption, print_json
from pdserve.client.target import DEFAULT_TARGET

if TYPE_CHECKING:
    from pdserve.pb import operator_pb2 as pb

FOLLOW_EVERY_S = 0.5


def logs(
    name: Annotated[
        str,
        typer.Argument(
            help="supervisor, gateway (gateway-1, …), a worker such as prefill-0, or a process that has ended: NAME@PID"
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="wait for further output and print it")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=1, help="print only the last lines")] = None,
    target: HereOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Print the log of one part of the service, on the host it was started on. Without a name, list the logs and their
    paths, also those of processes that have ended."""
    from ops.launch.logs import read_part
    from ops.launch.operator import SUPERVISOR, list_logs, read_log_of, supervisor_log
    from ops.launch.state import ServiceState
    from pdserve.core.errors import InvalidRequest

    state = ServiceState.of(target)
    if not name:
        _show(list_logs(state.socket) if state.process() else [supervisor_log(state.log)], as_json)
        return
    if name == SUPERVISOR:
        if not state.log:
            raise InvalidRequest("the supervisor logs to the terminal it was started in; it has no file")
        _print(lambda _, offset: read_part(state.log, offset), follow, lines)
    else:
        _print(lambda path, offset: read_log_of(state.socket, name, path, offset), follow, lines)


def _show(found: Sequence[pb.Log], as_json: bool) -> None:
    if as_json:
        print_json({"logs": [{"name": log.name, "node": log.node, "path": log.path} for log in found]})
        return
    widths = [max(map(len, column)) for column in ([log.name for log in found], [log.node for log in found])]
    for log in found:
        typer.echo(f"{log.name:<{widths[0]}}  {log.node:<{widths[1]}}  {log.path or 'on its terminal'}")


def _print(read: Callable[[str, int], pb.ReadLogResponse], follow: bool, lines: int | None) -> None:
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
