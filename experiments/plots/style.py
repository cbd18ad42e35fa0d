"""The visual language of all plots: the waterfall's colours for stages, a colour-blind-safe palette for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.core.interval import Interval

INK, FAINT, GRID = "#1d2733", "#5f6b7a", "#e6e8eb"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Okabe and Ito's colours, which remain distinct with any common colour vision deficiency."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PD, COLOCATED = PALETTE[1], PALETTE[0]
"""Disaggregated and colocated have the same colours in every plot."""


def canvas(columns: int = 1, rows: int = 1, width_in: float = 8.0, height_in: float = 4.2, **options: Any) -> Any:
    """A matplotlib figure with a grid of axes (``figure.axes``), without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes in figure.subplots(rows, columns, squeeze=False, **options).flat:
        _style(axes)
    return figure


def _style(axes: Any) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c9ced6")


def label(axes: Any, *, x: str, y: str, title: str = "") -> None:
    """Name both axes with their units, and the plot."""
    axes.set_xlabel(x, fontsize=9.5, color=FAINT)
    axes.set_ylabel(y, fontsize=9.5, color=FAINT)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)


def legend(axes: Any, columns: int = 1, **options: Any) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=9, ncols=columns, labelcolor=INK, **options)


def vertical(points: Sequence[Mapping[str, Any] | Interval], factor: float = 1.0) -> dict[str, Any]:
    """``y`` and ``yerr`` of axes.errorbar for intervals times ``factor``. What has no interval gets no bar."""
    chosen = [(p if isinstance(p, Interval) else Interval.from_dict(p)).scaled(factor) for p in points]
    return {"y": [each.value for each in chosen], "yerr": list(zip(*(each.errors for each in chosen), strict=True))}


def plain_ticks(axes: Any, values: Sequence[float], which: str = "x") -> None:
    """Ticks of a logarithmic axis at ``values``, written as plain numbers."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def attainment(axes: Any, rates: Sequence[float], arms: Mapping[str, Sequence[Mapping[str, Any] | None]]) -> None:
    """The share of requests that met an SLO over the rate. ``arms``: by name (disaggregated, colocated) the intervals,
    None where there is none."""
    colors = {"disaggregated": PD, "colocated": COLOCATED}
    for number, (name, intervals) in enumerate(arms.items()):
        known = [(rate, each) for rate, each in zip(rates, intervals, strict=True) if each is not None]
        axes.errorbar(
            [rate for rate, _ in known], **vertical([each for _, each in known], 100),
            color=colors.get(name, PALETTE[(number + 2) % len(PALETTE)]),
            marker=MARKERS[number % len(MARKERS)],
            linestyle="-" if name != "colocated" else (0, (5, 2)),
            markersize=5, capsize=3, linewidth=1.6, label=name,
        )  # fmt: skip
    axes.axhline(90, color=FAINT, linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_ylim(-4, 104)
    rate_axis(axes, rates)


def rate_axis(axes: Any, rates: Sequence[float]) -> None:
    """Ticks at the measured rates: logarithmic if they span more than a factor of 8."""
    chosen = sorted(set(rates))
    if chosen and chosen[-1] > 8 * chosen[0]:
        axes.set_xscale("log")
    plain_ticks(axes, chosen)
