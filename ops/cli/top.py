"""`pdserve top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import TargetsOption, fitted, plain_table, stdout_console, with_access
from ops.cli.status import scaling_line
from pdserve.client.target import DEFAULT_TARGET, AccessOptions

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from pdserve.client.status import ServiceStatus, ServiceWorker

HISTORY = 60
"""Statuses that the curves show."""
_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 12
_LESS = ("preempted", "tokens to do", "hits", "KV blocks", "wait", "role")
"""Columns that narrow terminals do without, in that order."""


@with_access
def top(
    access: AccessOptions,
    target: TargetsOption = DEFAULT_TARGET,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, help="seconds between two looks")] = 1.0,
    count: Annotated[int, typer.Option("--count", min=0, help="end after this many looks; 0: with Ctrl-C")] = 0,
) -> None:
    """Watch a service: its queue, its workers, their KV blocks and links. Ctrl-C ends it. Where the output is no
    terminal, every look is printed below the one before."""
    from rich.live import Live

    from pdserve.client.sync_client import Client

    console = stdout_console()
    history: deque[ServiceStatus] = deque(maxlen=HISTORY)
    left = count or -1
    with (
        Client(target, **access) as client,
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while left:
            history.append(client.status())
            left -= 1
            if console.is_terminal:
                live.update(view(console, target, history), refresh=True)
            else:
                console.print(view(console, target, history))
            if left:
                time.sleep(interval_s)


def view(console: Console, target: str, history: Sequence[ServiceStatus]) -> Group:
    """The last status of ``history``, with curves over all of it, as wide as the console."""
    from rich.console import Group
    from rich.text import Text

    now = history[-1]
    state = Text("ready", "green") if now.ready else Text("not ready", "red")
    title = Text.assemble(state, f" at {target} · {now.model} · pdserve {now.version} · up {now.uptime_s:.0f} s")
    workers = fitted(console, lambda without: _workers(history, without), _LESS)
    parts: list[RenderableType] = [title, Text(), _curves(history), Text(), workers]
    if now.scaling is not None:
        parts.insert(1, Text(scaling_line(now.scaling)))
    if any(worker.links for worker in now.workers):
        parts += [Text(), _links(now)]
    return Group(*parts)


def curve(values: Sequence[float]) -> str:
    """One character per value, as high as its share of the largest one."""
    most = max(values, default=0.0)
    if not most:
        return _LEVELS[0] * len(values)
    return "".join(_LEVELS[round(value / most * (len(_LEVELS) - 1))] for value in values)


def _curves(history: Sequence[ServiceStatus]) -> Table:
    table = plain_table(("requests",), ("now", "most"))
    table.add_column(f"last {len(history)} looks", no_wrap=True)
    for name in ("queued", "running"):
        values = [float(getattr(status, name)) for status in history]
        table.add_row(name, f"{values[-1]:.0f}", f"{max(values):.0f}", curve(values))
    return table


def _workers(history: Sequence[ServiceStatus], without: Collection[str]) -> Table:
    now = history[-1]
    numbers = ("used", "run", "wait", "tokens to do", "hits", "preempted")
    table = plain_table(
        [name for name in ("worker", "role", "state", "KV blocks") if name not in without],
        [name for name in numbers if name not in without],
    )
    before = {worker.worker_id: worker for worker in history[0].workers}
    for worker in now.workers:
        color = {"ready": "green", "awaited": "yellow", "starting": "yellow"}.get(worker.state, "red")
        used = 1 - worker.free_blocks / worker.num_blocks if worker.num_blocks else 0.0
        row = {
            "worker": worker.worker_id,
            "role": worker.role,
            "state": f"[{color}]{worker.state}[/]",
            "KV blocks": _bar(used),
            "used": f"{100 * used:.0f} %",
            "run": str(worker.running),
            "wait": str(worker.waiting),
            "tokens to do": str(worker.outstanding_tokens),
            "hits": _hits(worker, before.get(worker.worker_id)),
            "preempted": str(worker.preemptions),
        }
        table.add_row(*(row[str(column.header)] for column in table.columns))
    return table


def _hits(now: ServiceWorker, before: ServiceWorker | None) -> str:
    """The share of prompt tokens found in the prefix cache since ``before``."""
    cached, looked_up = now.prompt_tokens_cached, now.prompt_tokens_looked_up
    if before is not None and before is not now and before.prompt_tokens_looked_up <= looked_up:  # else it restarted
        cached, looked_up = cached - before.prompt_tokens_cached, looked_up - before.prompt_tokens_looked_up
    return f"{100 * cached / looked_up:.0f} %" if looked_up else "–"


def _links(now: ServiceStatus) -> Table:
    table = plain_table(("KV from", "to", "transport"), ("link",))
    for worker in now.workers:
        for link in worker.links:
            rate = f"{link.ceiling_gbs:.3g} GB/s" if link.ceiling_gbs else "not measured"
            table.add_row(worker.worker_id, link.worker_id, link.transport, rate)
    return table


def _bar(share: float) -> str:
    full = round(share * _BAR_CELLS)
    return "█" * full + "░" * (_BAR_CELLS - full)
