"""`pdserve logs`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated

import typer

from ops.cli.options import DEFAULT_TARGET, JsonOption, TargetOption

FOLLOW_EVERY_S = 0.5
PART_BYTES = 256 * 1024

Part = tuple[bytes, str, int]
"""Bytes, the file they are from, and the offset at which it goes on."""


def logs(
    name: Annotated[str, typer.Argument(help="supervisor, gateway, or a worker such as prefill-0")] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on with what is written from now on")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=1, help="only the last ones")] = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a part of the service, on the host it was started on. Without a name: which logs there are, and
    where."""
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
            raise InvalidRequest("the supervisor writes to the terminal it was started in; it has no log")
        read = _reader(state.log)
    else:

        def read(path: str, offset: int) -> Part:
            return operator.read_log(name, path, offset)

    _print(read, follow, lines)


def _show(found: dict[str, tuple[str, str]], as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(
            json.dumps({"logs": [{"name": name, "node": node, "path": path} for name, (node, path) in found.items()]})
        )
        return
    rows = [(name, node, path or "writes to its terminal") for name, (node, path) in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, node, path in rows:
        typer.echo(f"{name:<{widths[0]}}  {node:<{widths[1]}}  {path}")


def _reader(path: str) -> Callable[[str, int], Part]:
    from pdserve.core.errors import LaunchError

    def read(_: str, offset: int) -> Part:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(PART_BYTES)
        except OSError as error:
            raise LaunchError(f"cannot read {path}: {error.strerror}") from None
        return data, path, offset + len(data)

    return read


def _print(read: Callable[[str, int], Part], follow: bool, lines: int | None) -> None:
    """All there is (or its last ``lines``), then, with ``follow``, what comes: from a new file if there is one."""
    out = sys.stdout.buffer
    data, path, offset = read("", 0)
    last: deque[bytes] = deque(maxlen=lines)
    rest = b""
    while data:
        if lines is None:
            out.write(data)
        else:
            *whole, rest = (rest + data).split(b"\n")
            last.extend(whole)
        data, path, offset = read(path, offset)
    out.write(b"".join(line + b"\n" for line in last) + rest)
    out.flush()
    while follow:
        time.sleep(FOLLOW_EVERY_S)
        data, path, offset = read(path, offset)
        out.write(data)
        out.flush()
