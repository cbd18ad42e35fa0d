"""Pictures of `experiments.prefix`, drawn from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plots import style
from experiments.report.page import Picture
from pdserve.core.interval import Interval
from pdserve.core.timeline import Figure

Cell = Mapping[str, Any]

_ARMS = {
    "none": ("no reuse", style.PALETTE[6]),
    "prefill": ("cached on prefill", style.PALETTE[0]),
    "both": ("cached on prefill and decode", style.PALETTE[1]),
}
_DASHED = (0, (4, 3))


def ttft_over_shared(cells: Sequence[Cell], predicted: Sequence[Cell]) -> Picture:
    """``ttft`` and ``ttft_decode`` over the shared length, with the predicted ``ttft``."""
    figure = style.canvas(columns=2, width_in=10.0, height_in=4.2, sharey=True)
    left, right = figure.axes
    for axes, key in zip(figure.axes, Figure, strict=True):
        for number, (arm, (name, color)) in enumerate(_ARMS.items()):
            series = [cell for cell in cells if cell["arm"] == arm]
            points = [Interval.from_dict(cell[f"{key.value}_ms"]) for cell in series]
            axes.errorbar(
                [cell["shared_len"] for cell in series],
                **style.vertical(points),
                color=color, marker=style.MARKERS[number], markersize=5, capsize=3, linewidth=1.6, label=name,
            )  # fmt: skip
        _shared_axis(axes, cells)
    known = [line for line in predicted if line["ttft_ms"]["prefill"] is not None]
    if known:
        left.step(
            [line["shared_len"] for line in known], [line["ttft_ms"]["prefill"] for line in known],
            color=style.FAINT, linewidth=1.2, linestyle=_DASHED, where="post",
            label="arithmetic, with reuse", zorder=4,
        )  # fmt: skip
    left.set_ylim(bottom=0)
    style.label(left, x="shared with an earlier request, tokens", y="time, ms", title="ttft: token 1")
    style.label(right, x="shared with an earlier request, tokens", y="", title="ttft_decode: token 2")
    style.legend(left, loc="lower left")
    return Picture(
        "ttft_over_shared",
        f"TTFT over the shared length (prompts of {cells[0]['prompt_len']} tokens)",
        "Mean with 95 % intervals. Dashed: the prefill of the arm without reuse, scaled by the FLOPs of the tokens "
        "that are left to compute, plus everything else as it is. Both caches save the same computation; token 2 also "
        "waits for what has to be moved.",
        figure,
        "Two line plots of the time to token 1 and to token 2 over the shared length",
    )


def bytes_over_shared(cells: Sequence[Cell], predicted: Sequence[Cell]) -> Picture:
    """KV bytes per request over the shared length, measured and by arithmetic."""
    figure = style.canvas(width_in=7.0, height_in=4.2)
    axes = figure.axes[0]
    for number, (arm, (name, color)) in enumerate(_ARMS.items()):
        series = [cell for cell in cells if cell["arm"] == arm]
        axes.plot(
            [cell["shared_len"] for cell in series], [cell["kv_bytes"] / cell["n"] / 1e6 for cell in series],
            color=color, marker=style.MARKERS[number], linestyle="", label=name,
            # Where two arms move the same, the smaller mark leaves the larger one visible.
            markersize=(11, 6, 6)[number], markerfacecolor="white" if number == 0 else color, zorder=3 + number,
            clip_on=False,
        )  # fmt: skip
    for arm in ("none", "both"):
        axes.step(
            [line["shared_len"] for line in predicted], [line["kv_bytes"][arm] / 1e6 for line in predicted],
            where="post", color=style.FAINT, linewidth=1.2, linestyle=_DASHED, zorder=2,
            label="arithmetic" if arm == "both" else None,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    _shared_axis(axes, cells)
    style.label(axes, x="shared with an earlier request, tokens", y="KV moved per request, MB")
    style.legend(axes, loc="lower left")
    return Picture(
        "bytes_over_shared",
        "Bytes moved over the shared length",
        "Points: bytes that decode received and verified. Dashed: (blocks of the prompt − blocks that decode has) × "
        "bytes of a block. What only prefill has cached is moved like what it computes.",
        figure,
        "Plot of KV bytes per request over the shared length",
    )


def _shared_axis(axes: Any, cells: Sequence[Cell]) -> None:
    lengths = sorted({cell["shared_len"] for cell in cells})
    margin = 0.04 * cells[0]["prompt_len"]
    axes.set_xlim(-margin, cells[0]["prompt_len"] + margin)
    axes.set_xticks(lengths)
