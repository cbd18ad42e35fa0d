"""`pdserve status`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ops.cli.options import (
    JsonOption,
    TargetsOption,
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
    from rich.table import Table

    from pdserve.client.status import ServiceScaling, ServiceStatus, ServiceWorker


@with_access
def status(access: AccessOptions, target: TargetsOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """Show the service's workers, their load, and their KV blocks. On the host that the service was started on, also
    where its workers listen and their process ids."""
    answer = _status(Target.all_of(target, **access))
    if as_json:
        print_json(answer.to_dict())
        return
    from ops.waterfall.bars import human_bytes

    console = stdout_console()
    ready = "[green]ready[/]" if answer.ready else "[red]not ready[/]"
    console.print(
        f"{ready} at {target} · pdserve {answer.version} · up {answer.uptime_s:.0f} s · "
        f"{answer.queued} queued, {answer.running} running"
    )
    converted = f" from {answer.checkpoint_dtype}" if answer.checkpoint_dtype not in ("", answer.dtype) else ""
    console.print(
        f"model {answer.model} ({answer.dtype}{converted}, context {answer.context_length}) · KV "
        f"{human_bytes(answer.kv_bytes_per_token)} a token, {answer.block_size} tokens a block"
    )
    if len(answer.gateways) > 1:
        console.print(_gateways(answer))
    if answer.scaling is not None:
        console.print(scaling_line(answer.scaling))
    console.print(fitted(console, lambda without: _workers(answer, without), _LESS_OF_WORKERS))
    if any(worker.links for worker in answer.workers):
        console.print(fitted(console, lambda without: _pairs(answer, without), _LESS_OF_PAIRS))
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


_LESS_OF_WORKERS = ("heard", "restarts", "preempted", "cached", "device", "hits", "address", "node", "wait", "run")
_LESS_OF_PAIRS = ("why this one", "address")
"""Columns that narrow terminals do without, in that order."""


def _gateways(answer: ServiceStatus) -> Table:
    table = plain_table(("gateway", "state"), ("process", "queued", "running", "up"))
    for each in answer.gateways:
        color = "green" if each.state == "ready" else "red"
        known = each.state != "lost"
        table.add_row(
            each.target, f"[{color}]{each.state}[/]", str(each.pid) if known else "", str(each.queued),
            str(each.running), f"{each.uptime_s:.0f} s" if known else "",
        )  # fmt: skip
    return table


def _workers(answer: ServiceStatus, without: Collection[str]) -> Table:
    where = "address" if any(worker.address for worker in answer.workers) else "node"
    # A name tells the role that its worker began with.
    others = any(not worker.worker_id.startswith(worker.role) for worker in answer.workers)
    text = ("worker", *(("role",) if others else ()), "state", where, "device")
    numbers = ("free blocks", "cached", "hits", "run", "wait", "preempted", "restarts", "heard")
    table = plain_table(
        [name for name in text if name not in without], [name for name in numbers if name not in without]
    )
    for w in answer.workers:
        if w.state == "awaited":
            row = {"worker": w.worker_id, "role": w.role, "state": "[yellow]awaited[/]", where: "not there yet"}
        else:
            cores = w.cores if w.device == "cpu" else w.cuda_visible_devices
            row = {
                "worker": w.worker_id,
                "role": w.role,
                "state": f"[{'green' if w.state == 'ready' else 'red'}]{w.state}[/]",
                where: _where(w),
                "device": f"{w.device} {cores}".strip(),
                "free blocks": f"{w.free_blocks}/{w.num_blocks}",
                "cached": str(w.cached_blocks),
                "hits": _hits(w.prompt_tokens_cached, w.prompt_tokens_looked_up),
                "run": str(w.running),
                "wait": str(w.waiting),
                "preempted": str(w.preemptions),
                "restarts": str(w.engine_restarts),
                "heard": f"{w.heartbeat_age_s:.1f} s",
            }
        table.add_row(*(row.get(str(column.header), "") for column in table.columns))
    return table


def _pairs(answer: ServiceStatus, without: Collection[str]) -> Table:
    left = ("KV from", "to", "transport", "address")
    if not any(worker.address for worker in answer.workers):
        without = {*without, "address"}
    table = plain_table([name for name in left if name not in without], ("link",))
    if "why this one" not in without:
        table.add_column("why this one")
    workers = {worker.worker_id: worker for worker in answer.workers}
    for worker in answer.workers:
        for link in worker.links:
            peer = workers.get(link.worker_id)
            address = peer.kv_addresses.get(link.transport, "") if peer else ""
            on_host = "/" in address  # a socket name, without a port
            row = {
                "KV from": f"{worker.worker_id} on {worker.node}",
                "to": f"{link.worker_id} on {peer.node}" if peer else link.worker_id,
                "transport": link.transport or "–",
                "address": "within the host" if on_host else address,
                "link": f"{link.ceiling_gbs:.3g} GB/s" if link.ceiling_gbs else "not measured",
                "why this one": link.reason or "connected just now",
            }
            table.add_row(*(row[str(column.header)] for column in table.columns))
    return table


def _where(worker: ServiceWorker) -> str:
    if not worker.address:
        return worker.node
    return worker.address if worker.address.startswith(worker.node) else f"{worker.address} ({worker.node})"


def _hits(cached: int, looked_up: int) -> str:
    return f"{100 * cached / looked_up:.0f} %" if looked_up else "–"
