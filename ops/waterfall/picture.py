"""Waterfalls as one picture: all requests on a common time scale, then a panel for each.

Each figure has bars of its own, which end where its token was at the client. In one row of bars the stages in which
control messages, gateway and network are passed twice would push the prefill beyond token 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.waterfall.bars import COLORS, StageBar, bars, longest, proof
from pdserve.client.generation import Generation
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.timeline import Breakdown, Figure

_INK, _FAINT, _TTFT_COLOR, _DECODE_COLOR = "#222222", "#8a8f98", "#1b6ca8", "#b5179e"
_BAR_IN, _OVERVIEW_ROW_IN, _PANEL_EXTRA_IN = 0.2, 0.3, 1.0


FORMATS = (".jpg", ".pdf", ".png", ".svg", ".webp")


def check_picture(option: str, path: Path) -> None:
    """Raise `InvalidRequest`, which names ``option``, if no picture can be saved at ``path``. Creates its folder; an
    existing file is not changed."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidRequest(f"{option}: the name of the picture {str(path)!r} must end in one of {', '.join(FORMATS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InvalidRequest(f"{option}: {str(path)!r} cannot be written: {error.strerror}") from None


def save_waterfalls(generations: Sequence[Generation], path: str | Path, title: str = "") -> Path:
    """Draw ``generations`` (ValueError unless at least one has a breakdown) into the picture ``path``, whose suffix is
    one of `FORMATS`. Creates the folder. `PdserveError` if the picture cannot be written."""
    drawn = [(index, g, b) for index, g in enumerate(generations, 1) if (b := longest(g)) is not None]
    if not drawn:
        raise ValueError("no generation with a breakdown to draw")
    # Avoids pyplot, which needs global state and a display, and keeps figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    columns = 1 if len(drawn) == 1 else 2
    rows = math.ceil(len(drawn) / columns)
    panel_in = max(len(b.stages_ms) for _, _, b in drawn) * _BAR_IN + _PANEL_EXTRA_IN
    overview_in = len(drawn) * _OVERVIEW_ROW_IN + 0.8 if columns > 1 else 0.0
    height_in = rows * panel_in + overview_in + 1.2
    figure = Canvas(figsize=(13 if columns > 1 else 9, height_in), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        rows + (columns > 1), columns, height_ratios=[*([overview_in] if columns > 1 else []), *([panel_in] * rows)]
    )
    if columns > 1:
        _draw_overview(figure.add_subplot(grid[0, :]), drawn)
    for place, (index, generation, breakdown) in enumerate(drawn):
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[row + (columns > 1), column])
        _draw_panel(axes, f"#{index}  " if columns > 1 else "", generation, breakdown)
    figure.suptitle(title or "Where the time to first token went", fontsize=15, fontweight="bold", color=_INK)
    _draw_legend(figure, [b for _, _, b in drawn], 7 if columns > 1 else 5)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=130)
    except OSError as error:
        raise PdserveError(f"the picture {str(target)!r} cannot be written: {error.strerror or error}") from None
    return target


def _draw_overview(axes: Any, drawn: Sequence[tuple[int, Generation, Breakdown]]) -> None:
    for row, (_, generation, breakdown) in enumerate(drawn):
        for figure, at in _rows(generation, row, 0.62):
            for bar in bars(generation.breakdowns[figure]):
                axes.barh(at, abs(bar.length_ms), left=bar.left_ms, height=0.31, color=COLORS[bar.stage])
        _mark(axes, generation, row, 0.42)
        axes.annotate(
            _milliseconds(breakdown.total_ms), (breakdown.total_ms, row), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=_INK,
        )  # fmt: skip
    axes.set_yticks(range(len(drawn)), [f"#{i}  {g.prompt_tokens} tokens  {g.mode}" for i, g, _ in drawn], fontsize=9)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, max(b.total_ms for _, _, b in drawn) * 1.1)
    axes.set_title("All requests on one time scale", loc="left", fontsize=11, color=_INK)
    _style(axes)


def _draw_panel(axes: Any, prefix: str, generation: Generation, breakdown: Breakdown) -> None:
    placed = bars(breakdown)
    total_ms = max(breakdown.total_ms, 1e-6)
    for row, bar in enumerate(placed):
        emphasis = bar.stage == "kv_exposed"
        for figure, at in _rows(generation, row, 0.72):
            own = next((each for each in bars(generation.breakdowns[figure]) if each.stage == bar.stage), None)
            if own is not None:
                axes.barh(at, max(abs(own.length_ms), total_ms * 0.003), left=own.left_ms, height=0.36,
                          color=COLORS[bar.stage], edgecolor=_INK if emphasis else "none", linewidth=0.8)  # fmt: skip
        if row + 1 < len(placed):
            end_ms = bar.start_ms + bar.length_ms
            axes.plot([end_ms, end_ms], [row + 0.36, row + 0.64], color=_FAINT, linewidth=0.8)
        _label(axes, bar, row, total_ms)
    axes.set_yticks(range(len(placed)), [bar.stage for bar in placed], fontsize=8.5)
    axes.set_ylim(len(placed) - 0.4, -0.6)
    axes.set_xlim(min(0.0, *(bar.left_ms for bar in placed)), total_ms * 1.2)
    _mark(axes, generation, len(placed) / 2 - 0.5, len(placed) / 2 + 0.1)
    head = f"{prefix}{generation.prompt_tokens} tokens · {generation.mode} · ttft {_milliseconds(generation.ttft_ms)}"
    if generation.ttft_decode_ms is not None:
        head += f" · ttft_decode {_milliseconds(generation.ttft_decode_ms)}"
    axes.set_title(head, loc="left", fontsize=9.5, fontweight="bold", color=_INK, pad=16)
    axes.text(
        0, 1.02, f"{proof(generation)}; clocks ± {generation.clock_error_ms:.3f} ms", transform=axes.transAxes,
        fontsize=7.5, color=_FAINT, va="bottom",
    )  # fmt: skip
    _style(axes)


def _label(axes: Any, bar: StageBar, row: int, total_ms: float) -> None:
    """The stage's duration and share: inside a long bar, else beside it where there is room."""
    right_ms = bar.left_ms + abs(bar.length_ms)
    inside = abs(bar.length_ms) > 0.4 * total_ms
    to_the_right = not inside and right_ms < 0.7 * total_ms
    at_ms = (bar.left_ms + right_ms) / 2 if inside else right_ms if to_the_right else bar.left_ms
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.annotate(
        f"{_milliseconds(bar.length_ms)} · {bar.percent:.0f} %", (at_ms, row),
        xytext=(0 if inside else 5 if to_the_right else -5, 0), textcoords="offset points", va="center", fontsize=8,
        ha="center" if inside else "left" if to_the_right else "right", color="white" if inside else _INK,
        fontweight="bold" if inside or bar.stage == "kv_exposed" else "normal", bbox=None if inside else box, zorder=5,
    )  # fmt: skip


def _rows(generation: Generation, row: float, height: float) -> list[tuple[Figure, float]]:
    """The figures that a generation has, and where in a row of this height their bars are: ttft above ttft_decode."""
    return [(figure, row + height / 4 * (-1 if figure is Figure.TTFT else 1)) for figure in generation.breakdowns]


def _mark(axes: Any, generation: Generation, row: float, reach: float) -> None:
    """Lines at token 1 and token 2, from ``row - reach`` to ``row + reach``."""
    top, bottom = row - reach, row + reach
    figures = ((Figure.TTFT, _TTFT_COLOR), (Figure.TTFT_DECODE, _DECODE_COLOR))
    for figure, color in figures:
        at_ms = generation.figure_ms(figure)
        if at_ms is not None:
            axes.plot([at_ms, at_ms], [top, bottom], color=color, linewidth=1.4, linestyle=(0, (4, 2)), zorder=3)


def _draw_legend(figure: Any, breakdowns: Sequence[Breakdown], columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {stage for breakdown in breakdowns for stage in breakdown.stages_ms}
    handles: list[Any] = [Patch(color=color, label=stage) for stage, color in COLORS.items() if stage in seen]
    for label, color in (
        ("ttft (token 1), upper bars", _TTFT_COLOR),
        ("ttft_decode (token 2), lower bars", _DECODE_COLOR),
    ):
        handles.append(Line2D([], [], color=color, linewidth=1.6, linestyle=(0, (4, 2)), label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _style(axes: Any) -> None:
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelcolor=_INK)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("ms since the request left the client", fontsize=8, color=_FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9ced6")


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"
