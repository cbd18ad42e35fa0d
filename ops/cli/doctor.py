"""`pdserve doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ops.cli.options import JsonOption, plain_table, print_json, stderr_console, stdout_console, with_service_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ops.doctor.network import ClockReading
    from ops.doctor.report import DoctorReport, ExaminedNode, ExaminedPair
    from pdserve.core.config import PdserveConfig

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@with_service_options
def doctor(settings: PdserveConfig, as_json: JsonOption = False) -> None:
    """Examine the hosts that `up` with the same options would use: versions, devices, ports, clocks, links, memory.
    Exits with 1 if a service would not start or not serve."""
    from ops.doctor.examine import diagnose

    with stderr_console().status("examining") as status:
        report = diagnose(settings, status.update)
    if as_json:
        print_json(report.to_dict())
    else:
        _show(stdout_console(), report)
    raise SystemExit(1 if report.failed else 0)


def _show(console: Console, report: DoctorReport) -> None:
    from rich.markup import escape

    from pdserve.core.request import counted

    need = ""
    if report.need is not None:
        from ops.waterfall.bars import human_bytes

        need = f" · {human_bytes(report.need.total_bytes)} a worker"
    running = f" · a service runs on port {', '.join(map(str, report.services))}" if report.services else ""
    console.print(
        f"[bold]{report.config.model.path}[/] on {report.device} at {report.config.cluster.address}{need}{running}\n",
        soft_wrap=True,
    )
    if report.nodes:
        console.print(_nodes(report.nodes))
        console.print()
    if report.pairs:
        console.print(_pairs(report.pairs))
        console.print()
    for (level, check, what, remedy), where in _grouped(report).items():
        console.print(f"[{_COLORS[level]}]{level:4}[/] {check}: {escape(', '.join(where))}: {escape(what)}")
        if remedy:
            console.print(f"     → {escape(remedy)}")
    fails, warnings = (sum(finding.level == level for finding in report.findings) for level in ("fail", "warn"))
    verdict = "[red]not fit[/]" if report.failed else "[green]fit[/]"
    examined = f"{counted(len(report.nodes), 'node')}, {counted(len(report.pairs), 'pair')} examined"
    if servers := report.config.cluster.servers:
        examined = f"{counted(len(servers), 'server')} examined"
    console.print(f"{verdict}: {examined}; {fails} would fail, {counted(warnings, 'warning')}")


def _grouped(report: DoctorReport) -> dict[tuple[str, str, str, str], list[str]]:
    """Where each finding was made: what was found in several places is shown once."""
    places: dict[tuple[str, str, str, str], list[str]] = {}
    for each in report.findings:
        places.setdefault((each.level, each.check, each.what, each.remedy), []).append(each.where)
    return places


def _nodes(nodes: Sequence[ExaminedNode]) -> Table:
    from ops.waterfall.bars import human_bytes

    left = ("node", "workers", "python · torch · ray · pdserve", "model", "devices", "KV over")
    table = plain_table(left, ("memory", "clock ms", "wall s"))
    table.columns[left.index("workers")].no_wrap = False
    for node in nodes:
        report, workers = node.report, ", ".join(seat.worker_id for seat in node.seats)
        if report is None:
            table.add_row(node.name, workers, "[red]no answer[/]")
            continue
        table.add_row(
            node.name, workers, f"{report.python} · {report.torch} · {report.ray} · {report.pdserve}",
            report.model_hash[:8] or "[red]none[/]",
            ", ".join(device.name for device in report.devices) or f"{len(report.allowed_cores)} cores",
            _over(node), human_bytes(report.memory_bytes), *_clock(node.clock),
        )  # fmt: skip
    return table


def _over(node: ExaminedNode) -> str:
    """Interfaces that KV travels over; addresses only where they differ from the node's."""
    names = {f"{each.device} {each.address if each.address != node.name else ''}".strip() for each in node.interfaces}
    return ", ".join(sorted(name or node.name for name in names)) or ("[red]none[/]" if node.seats else "–")


def _clock(clock: ClockReading | None) -> tuple[str, str]:
    if clock is None:
        return "–", "–"
    if clock.is_ours:
        return "the same", "the same"
    return f"{clock.offset_s * 1e3:+.3f} ± {clock.error_s * 1e3:.3f}", f"{clock.wall_s:+.3f}"


def _pairs(pairs: Sequence[ExaminedPair]) -> Table:
    prompts = sorted({tokens for pair in pairs for tokens in pair.predictions})
    right = ("Gbit/s", "RTT ms", *(f"ms for {tokens}" for tokens in prompts), "hides tok/s")
    table = plain_table(("pair", "from → to", "by"), right)
    for pair in pairs:
        figures = pair.meeting.figures
        ends = f"{pair.prefill.node.ip} → {pair.decode.node.ip}"
        if figures is None:
            table.add_row(pair.name, ends, pair.meeting.transport, f"[red]{pair.meeting.obstacle}[/]")
            continue
        exposed_ms = {tokens: _short(each.exposed_s * 1e3) for tokens, each in pair.predictions.items()}
        table.add_row(
            pair.name, ends, pair.meeting.transport,
            f"{pair.gbs * 8:.3g}" if pair.gbs else "–",
            f"{figures.round_trip_s * 1e3:.3f}",
            *(exposed_ms.get(tokens, "–") for tokens in prompts),
            "–" if pair.hidden_tokens_per_s is None else f"{pair.hidden_tokens_per_s:,.0f}",
        )  # fmt: skip
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
