"""Pictures that any run may have, from one or several runs: ``pdserve plot``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.matrix import IDLE, goodput_panel
from experiments.report.drawing import ARM_LOOKS, DASHED, DOTTED, MARKERS, PALETTE, Mark, Panel, Picture, cumulative
from experiments.run_folder import Figures, RunData, stages_of
from pdserve.core.timeline import STAGE_NAMES

_MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Source:
    """A run. ``label`` names it among several; it is empty if there is only one."""

    label: str
    run: RunData
    summary: Figures

    def cells(self, key: str) -> Iterator[Any]:
        """The cells of its summary that have a figure."""
        return (cell for cell in self.summary.get("cells", ()) if isinstance(cell, Mapping) and cell.get(key))


def pictures(sources: Sequence[Source]) -> list[Picture]:
    """Everything that the runs have data for."""
    return [each for make in (_exposed, _goodput, _stages) if (each := make(sources)) is not None]


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part)


def _exposed(sources: Sequence[Source]) -> Picture | None:
    points = [
        {**cell, "series": _joined(source.label, *map(cell.get, ("workers", "transport", "overlap")))}
        for source in sources
        for cell in source.cells("exposed_ms")
        if cell.get("load") == IDLE and "prompt_len" in cell and not {"width", "first_token"} & cell.keys()
    ]
    if not points:
        return None
    points = [{key: point[key] for key in ("series", "prompt_len", "exposed_ms")} for point in points]
    panel = Panel(
        [Mark(points, "prompt_len", "exposed_ms", by="series")],
        "prompt length, tokens",
        "exposed transfer, ms",
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
    places: dict[str, list[Figures]] = {}
    for source in sources:
        for cell in source.cells("goodput_rps"):
            rate = cell["rate"] if "rate" in cell else cell["rate_per_device"] * cell["devices"]
            tokens = f"{cell['prompt_len']} tokens" if "prompt_len" in cell else ""
            where = _joined(*map(cell.get, ("workers", "split", "transport", "overlap")), tokens)
            places.setdefault(where, []).extend(
                {"parameters": where, "series": _joined(source.label, arm), "rate": float(rate), "goodput_rps": good}
                for arm, good in cell["goodput_rps"].items()
                if good is not None
            )
    places = {where: points for where, points in places.items() if points}
    if not places:
        return None
    looks = {
        _joined(source.label, arm): {"color": look["color"], "marker": MARKERS[number % len(MARKERS)],
                                     "linestyle": ("-", DASHED, DOTTED)[number % 3]}
        for number, source in enumerate(sources)
        for arm, look in ARM_LOOKS.items()
    }  # fmt: skip
    return Picture(
        "goodput_over_rate",
        "Goodput over rate",
        "Requests per second that meet the SLO, with 95 % intervals. On the dotted line every request meets it.",
        [goodput_panel(each, "rate", "goodput_rps", "series", looks, title=where) for where, each in places.items()],
        columns=min(3, len(places)),
        share={"sharex": True, "sharey": True},
        legend=True,
    )


def _stages(sources: Sequence[Source]) -> Picture | None:
    series = {
        _joined(source.label, arm): stages_of(row for row in source.run.rows if row.arm == arm)
        for source in sources
        for arm in dict.fromkeys(row.arm for row in source.run.rows)
    }
    having = {name: {key: each[name] for key, each in series.items() if name in each} for name in STAGE_NAMES}
    means = {name: max(each.mean() for each in found.values()) for name, found in having.items() if found}
    longest = sorted(means, key=means.__getitem__)[-_MOST_STAGES:]
    if not longest:
        return None
    looks = {
        key: {"color": ARM_LOOKS.get(key, {"color": PALETTE[number % len(PALETTE)]})["color"]}
        for number, key in enumerate(series)
    }
    panels = []
    for name in filter(longest.__contains__, STAGE_NAMES):
        shares = cumulative({key: each.dropna() for key, each in having[name].items()}, percent=True)
        mark = Mark([{"stage": name, **share} for share in shares], "value", "share", "series", looks, kind="steps")
        panels.append(Panel([mark], "ms", "requests, %", name, ylim=(0, 101)))
    return Picture(
        "stage_cdfs",
        "Distributions of the stages",
        "The longest stages of ttft_decode: the share of the requests of all cells whose stage took at most so long.",
        panels,
        columns=min(3, len(panels)),
        share={"sharey": True},
        legend=True,
    )
