"""Waterfalls in the terminal: each stage is a bar that starts where the previous one ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.waterfall.bars import COLORS, StageBar, bars, guessed, longest, proof, reused
from pdserve.client.generation import Generation, TransferDetails
from pdserve.core.timeline import Breakdown, Figure

_BAR_WIDTH = 44
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STACKED_WIDTH = 60


def waterfall(generation: Generation) -> RenderableType:
    """One request: a table of stages with bars for both figures on one time scale, then the proof."""
    scale_ms = max([b.total_ms for b in generation.breakdowns.values()], default=0.0) or 1.0
    parts: list[RenderableType] = [_headline(generation)]
    if generation.placements:
        parts.append(Text(generation.placements[-1], style="dim"))
    parts += [Text(f"tried again: {failed}", style="dim") for failed in generation.failures]
    for figure, breakdown in generation.breakdowns.items():
        table = Table(box=None, padding=(0, 1), show_header=False, pad_edge=False)
        table.add_column(width=14)
        table.add_column(justify="right", width=9)
        table.add_column(justify="right", width=7)
        table.add_column(width=_BAR_WIDTH)
        table.add_row(
            Text(figure.value, style="bold"), Text(f"{breakdown.total_ms:.2f}", style="bold"), Text("ms", style="dim"),
            Text(f"token {2 if figure is Figure.TTFT_DECODE else 1} at the client", style="dim"),
        )  # fmt: skip
        for bar in bars(breakdown):
            style = f"bold {COLORS[bar.stage]}" if bar.stage == "kv_exposed" else ""
            table.add_row(
                Text(bar.stage, style=style),
                Text(f"{bar.length_ms:.2f}", style=style),
                Text(f"{bar.percent:.1f} %", style="dim"),
                _positioned(bar, scale_ms),
            )
        parts.append(table)
    if Figure.TTFT_DECODE not in generation.breakdowns:
        parts.append(Text("no second token, so no ttft_decode", style="dim"))
    parts.append(_proof_line(generation))
    return Group(*parts)


def overview(generations: Sequence[Generation]) -> RenderableType:
    """Several requests: a table with one column each, then a stacked bar of each figure on a common time scale."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    for index in range(1, len(generations) + 1):
        table.add_column(f"#{index}", justify="right", no_wrap=True, min_width=7)
    table.add_row("tokens", *(str(g.prompt_tokens) for g in generations))
    if len({g.mode for g in generations}) > 1:
        table.add_row("mode", *({"colocated": "coloc."}.get(g.mode, g.mode) for g in generations))
    for figure in Figure:
        table.add_row(figure.value, *(_number(g.figure_ms(figure)) for g in generations), style="bold")
    breakdowns = [breakdown.stages_ms if (breakdown := longest(g)) else {} for g in generations]
    for stage, color in COLORS.items():
        if any(stage in stages for stages in breakdowns):
            style = f"bold {color}" if stage == "kv_exposed" else ""
            table.add_row(f"  {stage}", *(_number(stages.get(stage)) for stages in breakdowns), style=style)
    error_ms = max((g.clock_error_ms for g in generations), default=0.0)
    note = f"ms; the stages are those of ttft_decode; clocks ± {error_ms:.3f} ms"
    scale_ms = max((g.ttft_decode_ms or g.ttft_ms for g in generations), default=1.0)
    rows = Table(box=None, padding=(0, 1), show_header=False, pad_edge=False)
    for index, generation in enumerate(generations, 1):
        for figure, breakdown in generation.breakdowns.items():
            number, token = (f"#{index}", "1") if figure is Figure.TTFT else ("", "2")
            rows.add_row(number, token, _stacked(breakdown, scale_ms, _STACKED_WIDTH), f"{breakdown.total_ms:.1f} ms")
    return Group(table, Text(note, style="dim"), Text(), rows, legend(generations))


def legend(generations: Sequence[Generation]) -> Text:
    """The colours of the stages that occur."""
    seen = {stage for g in generations for b in g.breakdowns.values() for stage in b.stages_ms}
    text = Text()
    for stage, color in COLORS.items():
        if stage in seen:
            text.append("█ ", style=color).append(f"{stage}  ")
    return text.append("to token 1, and to token 2", style="dim")


def _headline(generation: Generation) -> Text:
    workers = generation.prefill_worker
    if generation.decode_worker not in ("", generation.prefill_worker):  # empty if only one token was requested
        workers = f"{generation.prefill_worker} → {generation.decode_worker}"
    attempts = f" · {generation.attempts} attempts" if generation.attempts > 1 else ""
    return Text.assemble(
        (generation.request_id, "bold"),
        f" · {generation.prompt_tokens} + {len(generation.token_ids)} tokens · {generation.mode} · {workers}{attempts}",
    )


def _proof_line(generation: Generation) -> Text:
    equal = generation.kv_bytes == generation.kv_bytes_expected
    text = Text(proof(generation), style="" if equal else "bold red")
    text.append(f"\n{reused(generation)}", "dim")
    if guesses := guessed(generation):
        text.append(f"\n{guesses}", "dim")
    if generation.kv_bytes:
        transfer = generation.transfer
        text.append(
            f"\nwire {transfer.wire_ms:.2f} ms by the engine's own clock"
            if not transfer.request_to_ready_ms
            else f"\ntransfer exposed {transfer.exposed_ms:.2f} ms; export {transfer.export_ms:.2f}, wire "
            f"{transfer.wire_ms:.2f}, import {transfer.import_ms:.2f} ms"
            f"\nrequest to ready {transfer.request_to_ready_ms:.2f} ms; {transfer.gbs:.2f} GB/s{_of_ceiling(transfer)}",
            style="dim",
        )
    residues = ", ".join(
        f"{b.unattributed_ms:+.2f} ms of {figure.value}" for figure, b in generation.breakdowns.items()
    )
    return text.append(
        f"\nunattributed {residues or 'unknown'}; clock error ± {generation.clock_error_ms:.3f} ms", "dim"
    )


def _of_ceiling(transfer: TransferDetails) -> str:
    return f", {100 * transfer.gbs / transfer.ceiling_gbs:.0f}% of its link" if transfer.ceiling_gbs else ""


def _positioned(bar: StageBar, scale_ms: float) -> Text:
    left = max(0.0, bar.left_ms) / scale_ms * _BAR_WIDTH
    length = abs(bar.length_ms) / scale_ms * _BAR_WIDTH
    column = min(_BAR_WIDTH - 1, int(left))
    eighths = max(1, round(length * 8))  # at least a hairline, so that no stage is invisible
    whole, rest = divmod(eighths, 8)
    drawn = "█" * min(whole, _BAR_WIDTH - column) + (_EIGHTHS[rest].strip() if column + whole < _BAR_WIDTH else "")
    return Text(" " * column).append(drawn, style=COLORS[bar.stage])


def _stacked(breakdown: Breakdown, scale_ms: float, width: int) -> Text:
    cells: list[tuple[str, str]] = [(" ", "")] * width
    for bar in bars(breakdown):
        first, last = (round(x / scale_ms * width) for x in (bar.left_ms, bar.left_ms + abs(bar.length_ms)))
        for column in range(max(0, first), min(width, last)):
            cells[column] = ("█", COLORS[bar.stage])
    return Text.assemble(*cells)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
