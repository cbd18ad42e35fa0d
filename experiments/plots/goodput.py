"""Pictures of `experiments.goodput`, drawn from the systems of its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plots import style
from experiments.report.page import Picture

System = Mapping[str, Any]


def over_load(systems: Sequence[System]) -> Picture:
    """Goodput per device over the load per device, one line per system."""
    figure = style.canvas(width_in=7.2, height_in=4.4)
    axes = figure.axes[0]
    rates = sorted({point["rate_per_device"] for system in systems for point in system["points"]})
    for number, system in enumerate(systems):
        points = [(point["rate_per_device"], point["goodput_rps_per_device"]) for point in system["points"]]
        axes.errorbar(
            [rate for rate, _ in points], **style.vertical([good for _, good in points]),
            label=system["system"], capsize=3, markersize=5, linewidth=1.6, **_look(number, system, systems),
        )  # fmt: skip
    axes.plot([0, rates[-1]], [0, rates[-1]], color=style.FAINT, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_xlim(0, rates[-1] * 1.06)
    axes.set_ylim(bottom=-0.02 * rates[-1])
    style.plain_ticks(axes, rates)
    style.label(axes, x="offered load, requests/s per device", y="goodput, requests/s per device")
    style.legend(axes, loc="upper left")
    return Picture(
        "goodput",
        "Goodput over load",
        "Requests per second and device that meet the SLO, with 95 % intervals. On the dotted line every request meets "
        "it. Where a curve falls, the system spends its time on requests that are late anyway.",
        figure,
        "Line plot of goodput per device over the offered load per device",
    )


def attainment(systems: Sequence[System]) -> Picture:
    """The share of requests that met the SLO over the load per device."""
    figure = style.canvas(width_in=7.2, height_in=4.2)
    axes = figure.axes[0]
    rates = sorted({point["rate_per_device"] for system in systems for point in system["points"]})
    for number, system in enumerate(systems):
        points = [(point["rate_per_device"], point["attainment"]) for point in system["points"]]
        axes.errorbar(
            [rate for rate, _ in points], **style.vertical([met for _, met in points], 100),
            label=system["system"], capsize=3, markersize=5, linewidth=1.6, **_look(number, system, systems),
        )  # fmt: skip
    axes.axhline(90, color=style.FAINT, linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_ylim(-4, 104)
    axes.set_xlim(0, rates[-1] * 1.06)
    style.plain_ticks(axes, rates)
    style.label(axes, x="offered load, requests/s per device", y="requests that meet the SLO, %")
    style.legend(axes, loc="lower left")
    return Picture(
        "attainment",
        "Attainment over load",
        "Share of all requests that meet the SLO, with 95 % intervals; failed requests do not. The dashed line is the "
        "90 % above which a system sustains the load.",
        figure,
        "Line plot of attainment over the offered load per device",
    )


def _look(number: int, system: System, systems: Sequence[System]) -> dict[str, Any]:
    """Colocated systems are blue and dashed. The first split has the colour of disaggregation, others further ones."""
    if system["arm"] == "colocated":
        dashes = (0, (5, 2)) if system["devices"] == systems[0]["devices"] else (0, (1, 1.5))
        return {"color": style.COLOCATED, "linestyle": dashes, "marker": "s"}
    splits = [each for each in systems if each["arm"] == "pd"]
    at = splits.index(system)
    return {"color": style.PALETTE[1 + at % (len(style.PALETTE) - 1)], "marker": style.MARKERS[at % len(style.MARKERS)]}
