"""`pdserve status` and `pdserve top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import (
    JsonOption,
    TargetsOption,
    colored,
    fitted,
    plain_table,
    print_json,
    print_note,
    stderr_console,
    stdout_console,
    with_access,
)
from pdserve.client.target import DEFAULT_TARGET, AccessOptions, Target

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from pdserve.client.status import ServiceScaling, ServiceStatus, ServiceWorker


@with_access
def status(access: AccessOptions, target: TargetsOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """Show the service's workers, their load, and their KV blocks. On the host that the service was started on, also
    where its workers listen and their process ids."""
    targets = Target.all_of(target, **access)
    answer = _status(targets)
    if as_json:
        print_json(answer.to_dict())
        return
    console = stdout_console()
    for part in _parts(console, targets, answer):
        console.print(part)
    if answer.costs:
        console.print("measured here")
    for line in answer.costs:
        console.print(f"  {line}")
    for worker in answer.workers:
        if worker.failing:
            print_note(console, f"{worker.worker_id}: {worker.failing}")
    for note in answer.notes:
        print_note(console, note)
    for worker in answer.workers:
        if worker.kv_refused:
            refused = ", ".join(f"{count} {reason}" for reason, count in sorted(worker.kv_refused.items()))
            console.print(f"[yellow]{worker.worker_id} refused KV messages: {refused}[/]")


def _parts(console: Console, targets: Sequence[Target], answer: ServiceStatus) -> list[RenderableType]:
    """What `status` and `top` show: lines on the service, then tables that fit the console."""
    from ops.waterfall.bars import human_bytes

    ready = colored("ready" if answer.ready else "not ready")
    converted = f" from {answer.checkpoint_dtype}" if answer.checkpoint_dtype not in ("", answer.dtype) else ""
    parts: list[RenderableType] = [
        f"{ready} at {','.join(map(str, targets))} · pdserve {answer.version} · up {answer.uptime_s:.0f} s · "
        f"{answer.queued} queued, {answer.running} running",
        f"model {answer.model} ({answer.dtype}{converted}, context {answer.context_length}) · KV "
        f"{human_bytes(answer.kv_bytes_per_token)} a token, {answer.block_size} tokens a block",
    ]
    if len(answer.gateways) > 1:
        parts.append(_gateways(console, answer))
    if answer.scaling is not None:
        parts.append(scaling_line(answer.scaling))
    parts += _engines(answer)
    parts.append(_workers(console, answer))
    if any(worker.links for worker in answer.workers):
        parts.append(_pairs(console, answer))
    return parts


def _engines(answer: ServiceStatus) -> list[str]:
    """A line on each kind of engine that is not pdserve's own, sorted: a map of protobuf has no order."""
    kinds = {(of.get("kind", ""), of.get("version", "")): of for worker in answer.workers if (of := worker.engine)}
    told = ("kind", "version", "model", "block_size", "kv_dtype")
    return [
        f"engine {kind} {version} · "
        + " · ".join(f"{name.replace('_', ' ')}: {value}" for name, value in sorted(of.items()) if name not in told)
        for (kind, version), of in kinds.items()
    ]


def scaling_line(scaling: ServiceScaling) -> str:
    """What the controller of roles and workers did last, and why it does nothing now."""
    now = f"; now: {scaling.verdict}" if scaling.verdict else ""
    if not scaling.last_action:
        return f"controller of {scaling.controller}: no action yet{now}"
    actions = sum(scaling.actions.values())
    return (
        f"controller of {scaling.controller}: {actions} action{'s' if actions > 1 else ''}, the last "
        f"{scaling.last_action_age_s:.0f} s ago: {scaling.last_action} ({scaling.reason}){now}"
    )


def _status(targets: Sequence[Target]) -> ServiceStatus:
    """The operator's view of a service that this user has started on this host, else the public one."""
    from ops.launch.state import ServiceState
    from pdserve.client.sync_client import Client
    from pdserve.core.errors import PdserveError

    if (state := ServiceState.at(targets[0].address)) is not None:
        try:
            with Client(state.operator) as operator:
                return operator.status()
        except PdserveError as error:
            print_note(stderr_console(), f"without addresses, as the service's supervisor does not tell them: {error}")
    with Client(targets) as client:
        return client.status()


def _gateways(console: Console, answer: ServiceStatus) -> Table:
    rows = []
    for each in answer.gateways:
        row = {"gateway": each.target, "state": colored(each.state), "queued": str(each.queued)}
        row["running"] = str(each.running)
        if each.state != "lost":
            row |= {"process": str(each.pid), "up": f"{each.uptime_s:.0f} s"}
        rows.append(row)
    return fitted(console, rows, ("gateway", "state"), ("process", "queued", "running", "up"))


def _workers(console: Console, answer: ServiceStatus) -> Table:
    where = "address" if any(worker.address for worker in answer.workers) else "node"
    # A name tells the role that its worker began with.
    others = any(not worker.worker_id.startswith(worker.role) for worker in answer.workers)
    rows = []
    for w in answer.workers:
        row = {"worker": w.worker_id, "role": w.role, "state": colored(w.state), where: "not there yet"}
        if w.state != "awaited":
            cores = w.cores if w.device == "cpu" else w.cuda_visible_devices
            row |= {
                where: _where(w),
                "device": f"{w.device} {cores}".strip(),
                "free blocks": f"{w.free_blocks}/{w.num_blocks}",
                "cached": str(w.cached_blocks),
                "hits": f"{100 * w.prompt_tokens_cached / w.prompt_tokens_looked_up:.0f} %"
                if w.prompt_tokens_looked_up
                else "–",
                "run": str(w.running),
                "wait": str(w.waiting),
                "tokens to do": str(w.outstanding_tokens),
                "preempted": str(w.preemptions),
                "restarts": str(w.engine_restarts + w.worker_restarts),
                "heard": f"{w.heartbeat_age_s:.1f} s",
            }
            if w.draft_tokens:
                row["guesses right"] = f"{100 * w.accepted_draft_tokens / w.draft_tokens:.0f} %"
        rows.append(row)
    text = ("worker", *(("role",) if others else ()), "state", where, "device")
    numbers = ["free blocks", "cached", "hits", "run", "wait", "tokens to do", "preempted", "restarts", "heard"]
    if any("guesses right" in row for row in rows):
        numbers.insert(3, "guesses right")
    less = ["heard", "restarts", "preempted", "cached", "device", "guesses right", "tokens to do", "hits", where]
    less += ["wait", "run"]
    return fitted(console, rows, text, numbers, less)


def _pairs(console: Console, answer: ServiceStatus) -> Table:
    rows = []
    workers = {worker.worker_id: worker for worker in answer.workers}
    for worker in answer.workers:
        for link in worker.links:
            peer = workers.get(link.worker_id)
            address = peer.kv_addresses.get(link.transport, "") if peer else ""
            rows.append(
                {
                    "KV from": f"{worker.worker_id} on {worker.node}",
                    "to": f"{link.worker_id} on {peer.node}" if peer else link.worker_id,
                    "transport": link.transport or "–",
                    "address": "within the host" if "/" in address else address,  # a socket's name has no port
                    "link": f"{link.ceiling_gbs:.3g} GB/s" if link.ceiling_gbs else "not measured",
                    "why this one": link.reason or "connected just now",
                }
            )
    left = ["KV from", "to", "transport"]
    if any(worker.address for worker in answer.workers):
        left.append("address")
    return fitted(console, rows, left, ("link",), ("why this one", "address"), ("why this one",))


def _where(worker: ServiceWorker) -> str:
    if not worker.address:
        return worker.node
    return worker.address if worker.address.startswith(worker.node) else f"{worker.address} ({worker.node})"


LOOK_EVERY_S = 1.0
HISTORY = 60
"""Statuses that the curves show."""
_LEVELS = "▁▂▃▄▅▆▇█"


@with_access
def top(
    access: AccessOptions,
    target: TargetsOption = DEFAULT_TARGET,
    count: Annotated[int, typer.Option("--count", min=0, help="end after this many looks; 0: with Ctrl-C")] = 0,
) -> None:
    """Watch a service: what `status` shows, and curves of its requests. Ctrl-C ends it. Without a terminal,
    every look is printed below the one before."""
    from rich.live import Live

    from pdserve.client.sync_client import Client

    console = stdout_console()
    history: deque[ServiceStatus] = deque(maxlen=HISTORY)
    left, targets = count or -1, Target.all_of(target, **access)
    with (
        Client(targets) as client,
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while left:
            history.append(client.status())
            left -= 1
            if console.is_terminal:
                live.update(view(console, targets, history), refresh=True)
            else:
                console.print(view(console, targets, history))
            if left:
                time.sleep(LOOK_EVERY_S)


def view(console: Console, targets: Sequence[Target], history: Sequence[ServiceStatus]) -> Group:
    """The last status of ``history``, and curves over all of it."""
    from rich.console import Group

    return Group(*_parts(console, targets, history[-1]), _curves(history))


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
