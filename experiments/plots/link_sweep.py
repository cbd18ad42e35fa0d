"""Pictures of `experiments.link_sweep`, drawn from its summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval

Cell = Mapping[str, Any]
Predicted = Callable[[Any, float, float], float]
"""Overlap, 10^9 bytes per second and round trip in ms; the exposed ms without the fixed cost."""

NAMES = {"none": "serial (none)", "chunk": "chunk-wise", "layer": "layer-wise", "as-configured": "as configured"}
_ORDER = tuple(NAMES)


class Named(Protocol):
    """A link with a name, for a mark on the axis of rates."""

    @property
    def name(self) -> str: ...

    @property
    def gbps(self) -> float: ...


def over_bandwidth(summary: Mapping[str, Any], links: Sequence[Named], predicted: Predicted | None) -> Picture:
    """Exposed time over the rate: predicted lines, measured points, Φ, and marks of named links."""
    cells = [cell for cell in summary["cells"] if not cell["rtt_ms"] or cell["shaping"] == "as it is"]
    figure = style.canvas(width_in=9.5, height_in=5.4)
    axes = figure.axes[0]
    means = [cell["exposed"]["mean"] for cell in cells if cell["exposed"]["mean"] > 0]
    floor_ms = min([0.5 * min(means, default=1.0), 1.0])
    shown = [*(cell["gbps"] for cell in cells), *(link.gbps for link in links), summary["phi_gbps"] or links[0].gbps]
    rates = np.geomspace(0.5 * min(shown), 2 * max(shown), 200)
    for overlap, series in _series(cells).items():
        color, marker = _look(overlap)
        fixed_ms = statistics.median(cell["fixed_ms"] or 0.0 for cell in series)
        modes = ("none", "chunk", "layer") if overlap == "as-configured" else (overlap,)
        for mode in modes:
            if predicted is None:
                continue
            line = [predicted(mode, rate / 8, 0.0) + fixed_ms for rate in rates]
            name = f"{NAMES[mode]}, predicted" if len(modes) > 1 else None
            axes.plot(rates, line, color=_look(mode)[0], linewidth=1.4, alpha=0.75, label=name)
        _points(axes, series, "gbps", "exposed", color, marker, NAMES[overlap], floor=floor_ms)
        _predictions(axes, series, "gbps", color, floor_ms)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(bottom=floor_ms)
    if summary["phi_gbps"] is not None:
        axes.axvline(summary["phi_gbps"], color=style.INK, linewidth=1.3)
        axes.annotate(f"Φ = {summary['phi_gbps']:.2g} Gbit/s", (summary["phi_gbps"], 1), xycoords=_x_data(axes),
                      xytext=(5, -4), textcoords="offset points", va="top", fontsize=9, color=style.INK)  # fmt: skip
    for link in links:
        axes.axvline(link.gbps, color=style.FAINT, linewidth=0.9, linestyle=(0, (2, 3)))
        axes.annotate(link.name, (link.gbps, 1), xycoords=_x_data(axes), xytext=(-3, -4), textcoords="offset points",
                      va="top", ha="right", rotation=90, fontsize=8.5, color=style.FAINT)  # fmt: skip
    style.plain_ticks(axes, [10.0**power for power in range(-4, 5) if rates[0] <= 10.0**power <= rates[-1]])
    style.label(axes, x="bandwidth of the link, Gbit/s", y="exposed transfer time, ms")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.legend(frameon=False, fontsize=9, ncols=4, labelcolor=style.INK, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    return Picture(
        "exposed_over_bandwidth",
        "Exposed transfer time over bandwidth",
        f"Points are means with 95 % intervals; the link was shaped: {summary['shaping']}. Lines are the prediction, "
        "including the fixed cost of a hand-off, for the mean prefill time of all cells; a short dash is that "
        "for the prefill time of its cell. Right of Φ, overlap hides nearly all of the transfer; left of it, no "
        "overlap can. Dotted lines mark the nominal rates of named links, without their round trips.",
        figure,
        "Line plot of exposed transfer time over bandwidth on logarithmic axes",
    )


def added_over_bandwidth(summary: Mapping[str, Any]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the rate."""
    cells = [cell for cell in summary["cells"] if not cell["rtt_ms"]]
    figure = style.canvas(columns=2, width_in=10.0, sharey=True)
    for axes, key, name in zip(figure.axes, ("added_ttft", "added_ttft_decode"), ("ttft", "ttft_decode"), strict=True):
        for overlap, series in _series(cells).items():
            _points(axes, series, "gbps", key, *_look(overlap), NAMES[overlap], line=True)
        if summary["phi_gbps"] is not None:
            axes.axvline(summary["phi_gbps"], color=style.INK, linewidth=1.1)
        axes.axhline(0, color=style.FAINT, linewidth=0.8)
        axes.set_xscale("log")
        style.plain_ticks(axes, sorted({cell["gbps"] for cell in cells}))
        style.label(axes, x="bandwidth of the link, Gbit/s", y="added, ms", title=f"added {name}")
    style.legend(figure.axes[0])
    return Picture(
        "added_over_bandwidth",
        "Added latency over bandwidth",
        "Median of the paired differences, disaggregated minus colocated, with 95 % intervals. Left: token 1, which "
        "does not wait for the hand-off. Right: token 2, which does. The vertical line is Φ.",
        figure,
        "Two line plots of added latency over bandwidth",
    )


def over_round_trip(cells: Sequence[Cell], predicted: Predicted | None) -> Picture:
    """Exposed time and added ``ttft_decode`` over the round trip, at one rate."""
    figure = style.canvas(columns=2, width_in=10.0, sharey=False)
    for axes, key, name in zip(
        figure.axes, ("exposed", "added_ttft_decode"), ("exposed", "added ttft_decode"), strict=True
    ):
        for overlap, series in _series(cells).items():
            color, marker = _look(overlap)
            if predicted is not None and key == "exposed":
                trips_ms = np.linspace(0.0, max(cell["rtt_ms"] for cell in cells), 50)
                fixed_ms = statistics.median(cell["fixed_ms"] or 0.0 for cell in series)
                line = [predicted(overlap, series[0]["link_gbs"], trip_ms) + fixed_ms for trip_ms in trips_ms]
                axes.plot(trips_ms, line, color=color, linewidth=1.4, alpha=0.75)
            _points(axes, series, "rtt_ms", key, color, marker, NAMES[overlap])
            if key == "exposed":
                _predictions(axes, series, "rtt_ms", color)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        style.label(axes, x="round trip, ms", y=f"{name}, ms", title=name)
    figure.axes[0].legend(frameon=False, fontsize=9, labelcolor=style.INK)
    return Picture(
        "over_round_trip",
        f"Over the round trip, at {cells[0]['gbps']:g} Gbit/s",
        "Left: the exposed transfer time, with the prediction as a line and, for the cell's own prefill, a dash. "
        "Right: what token 2 waits for in all. A hand-off needs half a round trip, because decode has announced the "
        "destination before; the window of unacknowledged bytes bounds the rate on long links.",
        figure,
        "Two plots of exposed and added time over the round trip",
    )


def _points(
    axes: Any,
    series: Sequence[Cell],
    x: str,
    y: str,
    color: str,
    marker: str,
    name: str,
    *,
    floor: float | None = None,
    line: bool = False,
) -> None:
    """Means with their intervals; with ``floor``, values below it are drawn there."""
    series = sorted((cell for cell in series if cell[y] is not None), key=lambda cell: float(cell[x]))
    points = [Interval.from_dict(cell[y]) for cell in series]
    if floor is not None:
        points = [
            replace(p, value=max(floor, p.value), lo=float(np.maximum(floor, p.lo)), hi=float(np.maximum(floor, p.hi)))
            for p in points  # numpy's maximum keeps nan
        ]
    axes.errorbar(
        [cell[x] for cell in series],
        **style.vertical(points),
        color=color, marker=marker, markersize=5.5, capsize=3, linewidth=1.4 if line else 0, elinewidth=1.2,
        label=name, zorder=3,
    )  # fmt: skip


def _predictions(axes: Any, series: Sequence[Cell], x: str, color: str, floor: float = 0.0) -> None:
    """A dash for the prediction of each cell."""
    known = [cell for cell in series if cell["predicted_ms"] is not None]
    axes.plot([cell[x] for cell in known], [max(floor, cell["predicted_ms"]) for cell in known],
              linestyle="", marker="_", markersize=15, markeredgewidth=1.4, color=color)  # fmt: skip


def _series(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    overlaps = sorted({cell["overlap"] for cell in cells}, key=_ORDER.index)
    return {overlap: [cell for cell in cells if cell["overlap"] == overlap] for overlap in overlaps}


def _look(overlap: str) -> tuple[str, str]:
    """Colour and marker of an overlap mode, the same in every plot."""
    number = _ORDER.index(overlap)
    return style.PALETTE[number], style.MARKERS[number]


def _x_data(axes: Any) -> Any:
    """Coordinates with x in data and y in the axes' height."""
    return axes.get_xaxis_transform()
