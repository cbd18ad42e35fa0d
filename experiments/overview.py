"""Pictures that any run may have, from one or several runs: ``pdserve plot``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.report.drawing import (
    ARM_LOOKS,
    DASHED,
    DOTTED,
    MARKERS,
    PALETTE,
    Mark,
    Panel,
    Picture,
    Rule,
    cumulative,
)
from experiments.run_folder import Figures, RunData
from pdserve.core.timeline import STAGE_NAMES, Figure

_MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Source:
    """A run. ``label`` names it among several; it is empty if there is only one."""

    label: str
    run: RunData
    summary: Figures


def pictures(sources: Sequence[Source]) -> list[Picture]:
    """Everything that the runs have data for."""
    return [each for make in (_exposed, _goodput, _stages) if (each := make(sources)) is not None]


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part)


def _exposed(sources: Sequence[Source]) -> Picture | None:
    points = [
        {
            "series": _joined(source.label, *(cell.get(key) for key in ("workers", "transport", "overlap"))),
            "prompt_len": cell["prompt_len"],
            "exposed_ms": cell["exposed_ms"],
        }
        for source in sources
        for cell in source.summary.get("cells", ())
        if isinstance(cell, Mapping) and cell.get("load") == "idle" and cell.get("exposed_ms") and "prompt_len" in cell
        if not {"width", "first_token"} & cell.keys()
    ]
    if not points:
        return None
    panel = Panel(
        [Mark(points, "prompt_len", "exposed_ms", by="series")],
        x="prompt length, tokens",
        y="exposed transfer, ms",
        log="x",
        ticks=[point["prompt_len"] for point in points],
        ylim=(0, None),
    )
    return Picture(
        "exposed_over_length",
        "Exposed transfer over prompt length",
        "Mean time that a disaggregated request on an idle service waits for its KV after the prompt is computed, with "
        "95 % intervals.",
        [panel],
        legend=True,
    )


def _goodput(sources: Sequence[Source]) -> Picture | None:
    """A panel per combination of parameters, in it a line per arm and run."""
    points = []
    for source in sources:
        for cell in source.summary.get("cells", ()):
            if not isinstance(cell, Mapping) or not isinstance(cell.get("goodput_rps"), Mapping):
                continue
            rate = cell["rate"] if "rate" in cell else cell["rate_per_device"] * cell["devices"]
            tokens = f"{cell['prompt_len']} tokens" if "prompt_len" in cell else ""
            where = _joined(*(cell.get(key) for key in ("workers", "split", "transport", "overlap")), tokens)
            points += [
                {"parameters": where, "run": source.label, "arm": arm, "series": _joined(source.label, arm),
                 "rate": float(rate), "goodput_rps": good}
                for arm, good in cell["goodput_rps"].items()
                if good is not None
            ]  # fmt: skip
    if not points:
        return None
    places = list(dict.fromkeys(point["parameters"] for point in points))
    runs, rates = list(dict.fromkeys(point["run"] for point in points)), sorted({point["rate"] for point in points})
    looks = {
        _joined(run, arm): {"color": look["color"], "marker": MARKERS[number % len(MARKERS)],
                            "linestyle": ("-", DASHED, DOTTED)[number % 3]}
        for number, run in enumerate(runs)
        for arm, look in ARM_LOOKS.items()
    }  # fmt: skip
    return Picture(
        "goodput_over_rate",
        "Goodput over rate",
        "Requests per second that meet the SLO, with 95 % intervals. On the dotted line every request meets it.",
        [
            Panel(
                [
                    Mark(
                        [each for each in points if each["parameters"] == where],
                        "rate",
                        "goodput_rps",
                        by="series",
                        looks=looks,
                    ),
                    Rule("diagonal"),
                ],
                x="offered load, requests/s",
                y="goodput, requests/s",
                title=where,
                ticks=rates,
                xlim=(0, rates[-1] * 1.06),
                ylim=(-0.02 * rates[-1], 1.03 * rates[-1]),
            )
            for where in places
        ],
        columns=min(3, len(places)),
        share={"sharex": True, "sharey": True},
        legend=True,
    )


def _stages(sources: Sequence[Source]) -> Picture | None:
    values: dict[str, dict[str, list[float]]] = {name: {} for name in STAGE_NAMES}
    for source in sources:
        for row in source.run.rows:
            stages_ms = row.stages_ms.get(Figure.TTFT_DECODE, {})
            for name in stages_ms.keys() & values.keys():
                values[name].setdefault(_joined(source.label, row.arm), []).append(stages_ms[name])
    means = {name: max(map(statistics.fmean, series.values())) for name, series in values.items() if series}
    longest = sorted(means, key=means.__getitem__)[-_MOST_STAGES:]
    chosen = [name for name in STAGE_NAMES if name in longest]
    if not chosen:
        return None
    names = dict.fromkeys(series for name in chosen for series in values[name])
    looks = {
        series: {"color": ARM_LOOKS.get(series, {"color": PALETTE[number % len(PALETTE)]})["color"]}
        for number, series in enumerate(names)
    }
    panels = []
    for name in chosen:
        data = [{"stage": name, **point} for point in cumulative(values[name], percent=True)]
        mark = Mark(data, "value", "share", by="series", looks=looks, kind="steps")
        panels.append(Panel([mark], x="ms", y="requests, %", title=name, ylim=(0, 101)))
    return Picture(
        "stage_cdfs",
        "Distributions of the stages",
        "The longest stages of ttft_decode: the share of the requests of all cells whose stage took at most so long.",
        panels,
        columns=min(3, len(chosen)),
        share={"sharey": True},
        legend=True,
    )
