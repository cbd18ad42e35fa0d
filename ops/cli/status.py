"""`pdserve status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.cli.options import (
    DEFAULT_TARGET,
    JsonOption,
    TargetOption,
    plain_table,
    print_json,
    print_note,
    stdout_console,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.client.status import ServiceStatus, ServiceWorker


def status(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """Show the service's workers, their load, and their KV blocks."""
    from pdserve.client.sync_client import Client

    with Client(target) as client:
        answer = client.status()
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
    console.print(_workers(answer))
    if any(worker.links for worker in answer.workers):
        console.print(_pairs(answer))
    for note in answer.notes:
        print_note(console, note)
    for worker in answer.workers:
        if worker.kv_refused:
            refused = ", ".join(f"{count} {reason}" for reason, count in sorted(worker.kv_refused.items()))
            console.print(f"[yellow]{worker.worker_id} refused KV messages: {refused}[/]")


def _workers(answer: ServiceStatus) -> Table:
    table = plain_table(
        ("worker", "state", "address", "device"),
        ("free blocks", "cached", "hits", "run", "wait", "preempted", "restarts", "heard"),
    )
    for w in answer.workers:
        if w.state == "awaited":
            table.add_row(w.worker_id, "[yellow]awaited[/]", "not there yet")
            continue
        cores = w.cores if w.device == "cpu" else w.cuda_visible_devices
        table.add_row(
            w.worker_id, f"[{'green' if w.state == 'ready' else 'red'}]{w.state}[/]", _where(w),
            f"{w.device} {cores}".strip(), f"{w.free_blocks}/{w.num_blocks}",
            str(w.cached_blocks), _hits(w.prompt_tokens_cached, w.prompt_tokens_looked_up),
            str(w.running), str(w.waiting), str(w.preemptions), str(w.engine_restarts), f"{w.heartbeat_age_s:.1f} s",
        )  # fmt: skip
    return table


def _pairs(answer: ServiceStatus) -> Table:
    table = plain_table(("KV from", "to", "transport", "address"), ("link",))
    table.add_column("why this one")
    workers = {worker.worker_id: worker for worker in answer.workers}
    for worker in answer.workers:
        for link in worker.links:
            peer = workers.get(link.worker_id)
            address = peer.kv_addresses.get(link.transport, "") if peer else ""
            on_host = "/" in address  # a socket name, without a port
            table.add_row(
                f"{worker.worker_id} on {worker.node}",
                f"{link.worker_id} on {peer.node}" if peer else link.worker_id,
                link.transport or "–",
                "within the host" if on_host else address,
                f"{link.ceiling_gbs:.3g} GB/s" if link.ceiling_gbs else "not measured",
                link.reason or "connected just now",
            )
    return table


def _where(worker: ServiceWorker) -> str:
    return worker.address if worker.address.startswith(worker.node) else f"{worker.address} ({worker.node})"


def _hits(cached: int, looked_up: int) -> str:
    return f"{100 * cached / looked_up:.0f} %" if looked_up else "–"
