"""Pictures of `experiments.transport`, drawn from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval

Summary = Mapping[str, Any]
Cells = Sequence[Mapping[str, Any]]
NAMES = {"memcpy": "one thread's memcpy", "socket": "a blocking socket"}
"""The ceilings, in words."""
_DASHES = {"memcpy": (0, (5, 3)), "socket": (0, (1, 2))}


def rate_over_size(summary: Summary) -> Picture:
    """GB/s over the size, with the ceilings as lines."""
    figure = style.canvas(width_in=8.6, height_in=4.8)
    axes = figure.axes[0]
    for name, cells in _by_transport(summary["ceilings"]).items():
        axes.plot(
            [cell["size_bytes"] for cell in cells], [cell["gbs"]["mean"] for cell in cells],
            color=style.FAINT, linewidth=1.4, linestyle=_DASHES[name], label=NAMES[name],
        )  # fmt: skip
    for number, (name, cells) in enumerate(_by_transport(summary["cells"]).items()):
        color = _series(axes, number, name, cells, "gbs", line=True)
        if "ceiling_gbs" in cells[0]:
            axes.plot(
                [cell["size_bytes"] for cell in cells], [cell["ceiling_gbs"] for cell in cells],
                color=color, linewidth=1.4, linestyle=_DASHES["memcpy"], label=f"ceiling of {name}",
            )  # fmt: skip
    _size_axis(axes, (*summary["cells"], *summary["ceilings"]))
    axes.set_yscale("log")
    _plain_log(axes.yaxis)
    style.label(axes, x=_size_label(summary), y="GB/s (10⁹ bytes per second)")
    _legend(figure)
    return Picture(
        "rate_over_size",
        "Rate over size",
        "Means with 95 % intervals; both axes are logarithmic. Grey lines are the ceilings, measured in the same "
        "turns: one thread that copies memory bounds what moves within a host, a blocking socket what moves over one."
        if summary["where"] == "local"
        else "Bytes of a hand-off over the receiver's time for them, with 95 % intervals, and the ceiling of the link, "
        "which is the best rate it has reached so far. Both axes are logarithmic.",
        figure,
        "Line plot of transfer rates over payload size",
    )


def time_over_size(summary: Summary) -> Picture:
    """Time over the size, with the fitted lines."""
    figure = style.canvas(width_in=8.6, height_in=4.8)
    axes = figure.axes[0]
    fits = {fit["transport"]: fit for fit in summary["fits"]}
    for number, (name, cells) in enumerate(_by_transport(summary["cells"]).items()):
        color = _series(axes, number, name, cells, "time_us", line=False)
        if name in fits:
            sizes = _steps(cells[0]["size_bytes"], cells[-1]["size_bytes"])
            cost_us, rate = fits[name]["per_message_us"]["mean"], fits[name]["rate_gbs"]["mean"]
            times_us = [cost_us + size / rate / 1e3 for size in sizes]
            drawn = [(size, time_us) for size, time_us in zip(sizes, times_us, strict=True) if time_us > 0]
            axes.plot(*zip(*drawn, strict=True), color=color, linewidth=1.2)
    if summary["message_bytes"] and any(cell["size_bytes"] > summary["message_bytes"] for cell in summary["cells"]):
        axes.axvline(summary["message_bytes"], color=style.FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.annotate(
            "several messages →", (summary["message_bytes"], 0.03), xycoords=("data", "axes fraction"),
            xytext=(5, 0), textcoords="offset points", fontsize=8.5, color=style.FAINT,
        )  # fmt: skip
    _size_axis(axes, summary["cells"])
    axes.set_yscale("log")
    _plain_log(axes.yaxis)
    style.label(axes, x=_size_label(summary), y="time, µs")
    _legend(figure)
    return Picture(
        "time_over_size",
        "Time over size, and the cost of a message" if summary["where"] == "local" else "Time over size",
        "Points are means with 95 % intervals. Lines are time = cost + bytes / rate, fitted to "
        + (
            "the sizes of one message; where a line is flat, the cost of a message dominates. Points beside their line "
            "show that the rate depends on the size, as it does once payloads exceed the processor's cache. To the "
            "right of the dotted line several messages are under way at once."
            if summary["where"] == "local"
            else "all prompt lengths; the cost is that of a whole hand-off."
        ),
        figure,
        "Log-log plot of transfer times over payload size with fitted lines",
    )


def size_text(num_bytes: float) -> str:
    """``64 KiB``, ``1.5 MiB``."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:g} B"


def _by_transport(cells: Cells) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["size_bytes"]):
        found.setdefault(cell["transport"], []).append(cell)
    return found


def _series(axes: Any, number: int, name: str, cells: Cells, key: str, *, line: bool) -> str:
    """Points with intervals; returns their colour."""
    points = [Interval.from_dict(cell[key]) for cell in cells]
    color = style.PALETTE[number % len(style.PALETTE)]
    axes.errorbar(
        [cell["size_bytes"] for cell in cells],
        **style.vertical(points),
        color=color, marker=style.MARKERS[number % len(style.MARKERS)], markersize=5, capsize=3,
        linewidth=1.6 if line else 0, elinewidth=1.2, label=name,
    )  # fmt: skip
    return color


def _size_axis(axes: Any, cells: Cells) -> None:
    sizes = sorted({cell["size_bytes"] for cell in cells})
    axes.set_xscale("log", base=2)
    style.plain_ticks(axes, sizes)
    axes.xaxis.set_major_formatter(lambda value, _: size_text(value))
    axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.4)


def _plain_log(axis: Any) -> None:
    """Ticks at 1, 2, 5, 10 ... of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=30))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Any) -> None:
    """A legend to the right of the axes, where no line is."""
    style.legend(figure.axes[0], loc="center left", bbox_to_anchor=(1.01, 0.5))


def _size_label(summary: Summary) -> str:
    return "payload" if summary["where"] == "local" else "KV of a request"


def _steps(first: float, last: float, count: int = 60) -> list[float]:
    return [first * (last / first) ** (step / (count - 1)) for step in range(count)]
