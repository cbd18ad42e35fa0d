"""``pdserve experiment link-sweep``: the exposed transfer time, and what it adds to the latency, against the bandwidth
and the round trip of the link between prefill and decode.

Each cell has one rate, round trip and overlap mode. The link is shaped in one of two ways, or not at all:

- in user space (default): ``transfer.shape_gbps`` and ``transfer.shape_round_trip_ms`` of the service that is started;
- by the kernel (``--hosts namespaces``, as root): the workers run on two hosts made of network namespaces, and tc
  bounds the rate of the cable between them (`experiments.hosts`). Round trips still come from user space, because many
  kernels have no netem;
- as it is (``--target``): one cell, at the ceiling that the service measured.

The prediction is arithmetic (`ops.doctor.handoff_prediction`): the prompt's bytes at the shaped rate, in the parts of
the overlap mode, and half a round trip; plus the fixed cost of a hand-off, which is measured with prompts of one block
before each cell. Φ is the rate at which the prompt's bytes take as long as its prefill."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Unpack

import numpy as np
from pydantic import Field

from experiments.added_ttft import linked_transports
from experiments.deployment import Deployment, Service
from experiments.experiment import Bench, Cell, Options, option
from experiments.hosts import MTU, PAYLOAD_SHARE, NamespaceDeployment
from experiments.matrix import PAIR_TOKENS, ModeMatrix, cell_caveats, idle_table, predicted, unclear_text
from experiments.modes import OVERLAPS, PD, LinkModel, PairOptions, overlap_of
from experiments.report.drawing import DOTTED, INK, MARKERS, PALETTE, Mark, Panel, Picture, Rule, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, FinishedCell, Parameters, RunData
from experiments.workloads.conversation import Workload
from ops.doctor.handoff_prediction import Overlap
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import Interval
from pdserve.core.request import counted

TOLERANCE, TOLERANCE_MS = 0.15, 3.0
"""A prediction is right if it is off by no more than one of these."""
KNEE_SHARE = 0.1
"""The knee is the rate below which more than this share of the prefill time is exposed."""
REACHED = 0.8
"""A link that never moved more than this share of its shaped rate is slower than asked for."""
USER_SPACE, KERNEL, AS_IT_IS = "user space", "kernel (tc)", "as it is"


class NamedLink(NamedTuple):
    """The nominal rate in one direction, in 10^9 bits per second, and a typical round trip."""

    name: str
    gbps: float
    rtt_ms: float


NAMED_LINKS = (
    NamedLink("cross-region", 5.0, 60.0),
    NamedLink("10G Ethernet", 10.0, 0.1),
    NamedLink("100G RoCE", 100.0, 0.01),
    NamedLink("400G InfiniBand", 400.0, 0.005),
    NamedLink("NVLink", 3600.0, 0.002),
)
"""Cross-region: one flow between two regions of a continent. NVLink: the fourth generation (H100), 18 links."""


class LinkSweepOptions(PairOptions):
    """Options of `LinkSweep`."""

    of_service = frozenset({"model", "gbps", "round_trips_ms", "round_trip_gbps", "overlaps", "chunk_tokens"})

    gbps: tuple[float, ...] = option(
        (0.05, 0.1, 0.2, 0.5, 2.0, 10.0),
        description="rates of the link, in 10^9 bits per second",
        quick=[0.05, 0.2, 1.0],
    )
    round_trips_ms: tuple[float, ...] = option(
        (10.0, 40.0),
        description="further round trips, measured at --round-trip-gbps ('' for none); the rates are measured without "
        "one",
        quick=[40.0],
    )
    round_trip_gbps: float = option(0.5, gt=0, description="rate of the cells with a round trip", quick=1.0)
    overlaps: tuple[Overlap, ...] = option(
        ("none", "chunk", "layer"),
        description="overlap modes to compare (see transfer.overlap)",
        quick=["none", "layer"],
    )
    prompt_len: int = option(512, ge=1, description="prompt length in tokens", quick=256)
    chunk_tokens: int = Field(
        128, ge=1, description="tokens of a prompt that a step computes (as engine.max_num_batched_tokens)"
    )
    pairs: int = option(12, ge=1, description="least pairs of requests per cell", quick=6)
    hosts: Literal["local", "namespaces"] = Field(
        "local",
        description="local: the link is shaped in user space; namespaces (as root): prefill and decode run on two "
        "hosts made of network namespaces, and the kernel shapes the cable between them",
    )


class LinkSweep(ModeMatrix):
    """See the module."""

    name = "link-sweep"
    question = "How fast does the link between prefill and decode have to be?"
    options_type = LinkSweepOptions
    fixed_options: ClassVar[Parameters] = {"transport": "tcp"}

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._namespaces: NamespaceDeployment | None = None

    def deployment(self, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
        """Services on this host, or on two hosts made of namespaces."""
        if self.options.hosts == "local":
            return super().deployment(report, **service)
        self._namespaces = NamespaceDeployment(report, **service)
        return self._namespaces

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per rate and overlap, and per round trip and overlap; for a running service a single one."""
        options = self.options
        if attached is not None:
            linked_transports(attached)
            if options.prompt_len + PAIR_TOKENS > attached.context_length:
                raise InvalidRequest(f"--prompt-len: does not fit the service's context of {attached.context_length}")
            parameters = {"gbps": None, "rtt_ms": None, "overlap": "as-configured", "shaping": AS_IT_IS}
            return [self.cell("as-configured", parameters, {}, options.pairs)]
        for name, values in (("--gbps", options.gbps), ("--round-trips-ms", options.round_trips_ms)):
            if any(value <= 0 for value in values):
                raise InvalidRequest(f"{name}: {min(values):g} is not above 0")
        if not options.gbps:
            raise InvalidRequest("--gbps: give at least one rate")
        further = bool(options.round_trips_ms) and options.round_trip_gbps not in options.gbps
        points = [(gbps, 0.0) for gbps in (*options.gbps, *([options.round_trip_gbps] if further else []))]
        points += [(options.round_trip_gbps, rtt_ms) for rtt_ms in options.round_trips_ms]
        kernel, cells = options.hosts == "namespaces", []
        if kernel:  # what shares a service comes together: only the rate changes while it runs
            points.sort(key=lambda point: point[1])
        for overlap, (gbps, rtt_ms) in itertools.product(options.overlaps, points):
            service = {
                "transfer.transport": "tcp",
                "transfer.overlap": overlap,
                "engine.max_num_batched_tokens": options.chunk_tokens,
                **({} if kernel else {"transfer.shape_gbps": gbps}),
                **({"transfer.shape_round_trip_ms": rtt_ms} if rtt_ms else {}),
            }
            shaping = KERNEL if kernel else USER_SPACE
            place = {"gbps": gbps, "rtt_ms": rtt_ms, "overlap": overlap, "shaping": shaping}
            cells.append(self.cell(f"{gbps:g}-gbps/{rtt_ms:g}-ms/{overlap}", place, service, options.pairs))
        return cells

    def workload(self, parameters: Parameters) -> Workload:
        """Random prompts of one length."""
        return super().workload({"prompt_len": self.options.prompt_len})

    async def measure(self, bench: Bench) -> None:
        """Shape the cable between hosts made of namespaces, then calibrate and send the pairs."""
        if self._namespaces is not None:
            self._namespaces.rate(bench.cell.parameters["gbps"])
        await super().measure(bench)

    def figures(self, cell: FinishedCell, run: RunData) -> Figures | None:
        """Beside `experiments.matrix.cell_figures`: ``within``, whether the prediction is off by at most 15 % or 3 ms;
        ``link_gbs`` (for payload), and ``reached``, whether anything moved at 80 % of the shaped rate; if not, the
        prediction takes the best rate that was measured."""
        figures = super().figures(cell, run)
        if figures is None:
            return None
        shaped_gbps, ceiling_gbs, rtt_ms = cell.parameters["gbps"], figures["ceiling_gbs"], cell.parameters["rtt_ms"]
        rows = [row for row in run.rows_of(cell.cell, PD) if row.error is None]
        if rtt_ms is None:  # the mean round trip between the gateway and the two workers bounds the clocks' error
            rtt_ms = round(min(row.clock_error_ms for row in rows), 6)
        # A slow link is measured with a single payload when it is opened, so the requests' own rates count as well.
        moved = [row.kv_bytes / row.transfer["wire_ms"] / 1e6 for row in rows if row.transfer.get("wire_ms")]
        link_gbs = max(ceiling_gbs, *moved)
        reached = shaped_gbps is None or 8 * link_gbs >= REACHED * shaped_gbps
        if reached:
            link_gbs = ceiling_gbs if shaped_gbps is None else shaped_gbps / 8
        if cell.parameters["shaping"] == KERNEL:
            link_gbs *= PAYLOAD_SHARE
        prediction = predicted(cell, self.options.prompt_len, figures["prefill_ms"], link_gbs, rtt_ms)
        predicted_ms, within = prediction["predicted_ms"], None
        if predicted_ms is not None:
            within = abs(figures["achieved_ms"] - predicted_ms) <= max(TOLERANCE * predicted_ms, TOLERANCE_MS)
        return {
            **figures,
            **prediction,
            "gbps": round(8 * ceiling_gbs, 6) if shaped_gbps is None else shaped_gbps,
            "rtt_ms": rtt_ms,
            "mode": overlap_of(cell),
            "link_gbs": round(link_gbs, 6),
            "reached": reached,
            "within": within,
        }

    def _model(self, run: RunData, cells: Sequence[Figures]) -> LinkModel | None:
        """The prediction for the mean prefill time of all cells; None if the model's layers are unknown."""
        known = next((cell for cell in run.cells if cell.facts.get("layout")), None)
        if known is None or not cells:
            return None
        return LinkModel.of(known, self.options.prompt_len, statistics.fmean(cell["prefill_ms"] for cell in cells))

    def found(self, cells: Sequence[Figures], run: RunData) -> Figures:
        """``shaping``. ``phi_gbps``: Φ with the mean prefill time, in 10^9 bits per second. ``knee`` by overlap mode:
        ``threshold_ms`` (a tenth of the prefill time), ``measured_gbps``, below which more than that is exposed (null
        with the reason in ``measured``), ``predicted_gbps``. ``links``: nominal links with ``name``, ``gbps``,
        ``rtt_ms``, ``times_phi`` and ``predicted_exposed_ms``."""
        found: Figures = {"shaping": cells[0]["shaping"] if cells else None, "knee": {}, "links": [], "phi_gbps": None}
        if (model := self._model(run, cells)) is None:
            return found
        threshold_ms, phi_gbps = KNEE_SHARE * model.prefill_ms, 8 * model.phi_gbs
        for overlap, series in _by_overlap(cells).items():
            points = sorted((cell["gbps"], cell["achieved_ms"]) for cell in series if not cell["rtt_ms"])
            measured, why = _crossing(points, threshold_ms)
            rate = model.rate_of(series[0]["mode"], threshold_ms, _fixed_ms(series))
            found["knee"][overlap] = {
                "threshold_ms": round(threshold_ms, 4),
                "measured_gbps": measured and round(measured, 6),
                "measured": why,
                "predicted_gbps": rate and round(rate, 6),
            }
        for link in NAMED_LINKS:
            exposed_ms = {each: round(model.exposed_ms(each, link.gbps / 8, link.rtt_ms), 4) for each in OVERLAPS}
            named = {**link._asdict(), "times_phi": round(link.gbps / phi_gbps, 4), "predicted_exposed_ms": exposed_ms}
            found["links"].append(named)
        return {**found, "phi_gbps": round(phi_gbps, 6)}

    def report(self, run: RunData, summary: Figures) -> Report:
        """The curves over bandwidth, what named links would expose, and a table of all cells."""
        cells, (how, *told) = summary["cells"], _SHAPINGS[summary["shaping"]]
        method = (
            f"{how}; prompts of {self.options.prompt_len} tokens, one request at a time, both modes A B B A; added "
            "times are medians of the differences, with 95 % intervals from their order"
        )
        unclear = {cell["cell"]: text for cell in cells if (text := unclear_text(cell, run))}
        caveats = [
            *told,
            not all(cell["reached"] for cell in cells)
            and "Some links were slower than they were shaped to; the prediction takes the best rate measured.",
            *cell_caveats(cells),
            *(f"No difference could be measured in {', '.join(unclear)}. {text}" for text in [*unclear.values()][:1]),
            "Named links are nominal rates and typical round trips, not measurements; what they expose is arithmetic "
            "for this model on this machine. A faster device has a shorter prefill, and so a larger Φ.",
        ]
        report = Report(
            "How fast the link has to be", self.question, _answer(summary), setup_of(run, method), [], caveats,
            summary["failed"],
        )  # fmt: skip
        if cells:
            columns = (
                "link | name",
                "Gbit/s | gbps:g",
                "round trip, ms | rtt_ms:g",
                "times Φ | times_phi:.3g",
                *(f"exposed with {each}, ms | predicted_exposed_ms.{each}:.3g" for each in OVERLAPS),
            )
            caption = "Exposed times are predicted, without the fixed cost of a hand-off."
            more = "within 15 % or 3 ms | within:yes|no", "prefill, ms | prefill_ms:.1f", "fixed, ms | fixed_ms:.2f"
            report.blocks += [
                _over_bandwidth(summary, self._model(run, cells)),
                table("What named links would expose", summary["links"], columns, caption),
                idle_table(cells, *more),
            ]
        return report


_SHAPINGS = {
    USER_SPACE: (
        "the link was shaped in user space, at the transport (transfer.shape_gbps)",
        "The shaper is part of the worker: it takes processor time for every piece of a payload, has no congestion "
        "control and loses no packets.",
    ),
    KERNEL: (
        "prefill and decode on two hosts made of network namespaces; tc (tbf) shaped the cable between them, "
        "round trips were added in user space",
        "tc's token bucket lets a burst of a millisecond pass, but at least two frames; the prediction counts "
        f"{MTU - 52} bytes of payload in each frame of {MTU + 14} bytes. Shaping costs time of the sender's core, so "
        "prefills that overlap with a transfer are slower than on hosts whose network card does the work. Control "
        "messages have a cable of their own, which is not shaped.",
    ),
    AS_IT_IS: (
        "a running service, its links as they are",
        "The rate is the ceiling that was measured when the link was opened. The round trip is the mean of those "
        "between the gateway and the two workers.",
    ),
    None: ("nothing was measured",),
}
"""By shaping: the method, and what a reader has to know about it."""


def _crossing(points: Sequence[tuple[float, float]], threshold_ms: float) -> tuple[float | None, str]:
    """The highest rate at which the exposed time falls below the threshold, interpolated between two rates on
    logarithmic scales, and in words how that is known."""
    if len(points) < 2:
        return None, "that two or more cells would tell"
    for (slow, slow_ms), (fast, fast_ms) in zip(points[-2::-1], points[:0:-1], strict=True):
        if slow_ms > threshold_ms >= fast_ms:
            share = math.log(slow_ms / threshold_ms) / math.log(slow_ms / max(fast_ms, 1e-6))
            return slow * (fast / slow) ** share, "interpolated"
    return None, "below the slowest one" if points[-1][1] <= threshold_ms else "above the fastest one"


def _by_overlap(cells: Sequence[Figures]) -> dict[str, list[Figures]]:
    """The cells of each overlap mode, whose predictions share the fixed cost of a hand-off."""
    overlaps = sorted({cell["overlap"] for cell in cells}, key=list(_LOOKS).index)
    return {overlap: [cell for cell in cells if cell["overlap"] == overlap] for overlap in overlaps}


def _fixed_ms(series: Sequence[Figures]) -> float:
    """The fixed cost of a hand-off, in the median over cells."""
    known_ms: list[float] = [cell["fixed_ms"] for cell in series if cell["fixed_ms"] is not None]
    return statistics.median(known_ms or [0.0])


def _answer(summary: Figures) -> str:
    cells, phi_gbps = summary["cells"], summary["phi_gbps"]
    if not cells:
        return "No pair of requests was completed."
    known = [cell["within"] for cell in cells if cell["within"] is not None]
    right = f"{sum(known)} of {len(known)} cells are within 15 % or 3 ms of the prediction."
    if summary["shaping"] == AS_IT_IS:
        exposed = Interval.from_dict(cells[0]["exposed_ms"]).text()
        phi = "" if phi_gbps is None else f"; Φ of this prompt is {phi_gbps:.3g} Gbit/s"
        return f"Over the link as it is ({cells[0]['gbps']:.3g} Gbit/s at best), {exposed} are exposed{phi}. {right}"
    if phi_gbps is None:
        return "The model's layers are unknown on this host, so that nothing could be predicted."
    parts = []
    for overlap, knee in summary["knee"].items():
        measured, rate = knee["measured_gbps"], knee["predicted_gbps"]
        where = f"a rate {knee['measured']}" if measured is None else f"{measured:.3g} Gbit/s"
        at = "no rate is enough" if rate is None else f"{rate:.3g} Gbit/s"
        parts.append(f"{where} with overlap {overlap} (by arithmetic: {at})")
    return (
        f"Φ, the rate at which the prompt's KV takes as long as its prefill, is {phi_gbps:.3g} Gbit/s here, by the "
        f"prefill of {counted(cells[0]['n'], 'pair')}. More than a tenth of the prefill time is exposed below "
        f"{'; '.join(parts)}. {right}"
    )


_LOOKS = {
    overlap: {"label": label, "color": color, "marker": marker}
    for overlap, label, color, marker in zip(
        ("none", "chunk", "layer", "as-configured"),
        ("serial (none)", "chunk-wise", "layer-wise", "as configured"),
        PALETTE,
        MARKERS,
        strict=False,
    )
}


def _over_bandwidth(summary: Figures, model: LinkModel | None) -> Picture:
    """Exposed time over the rate: predicted lines, of which a service that is as configured could have any; measured
    points; Φ, and marks of named links."""
    asis = summary["shaping"] == AS_IT_IS
    cells = [cell for cell in summary["cells"] if not cell["rtt_ms"] or asis]
    means_ms = [cell["achieved_ms"] for cell in cells if cell["achieved_ms"] > 0]
    floor_ms, phi = min(0.5 * min(means_ms, default=1.0), 1.0), summary["phi_gbps"]
    shown = [*(cell["gbps"] for cell in cells), *(link.gbps for link in NAMED_LINKS), phi or NAMED_LINKS[0].gbps]
    rates = np.geomspace(0.5 * min(shown), 2 * max(shown), 200).tolist()
    curves = [
        {"mode": mode, "gbps": gbps, "ms": model.exposed_ms(mode, gbps / 8) + _fixed_ms(series)}
        for series in _by_overlap(cells).values()
        for mode in (OVERLAPS if asis else (series[0]["mode"],))
        for gbps in rates
        if model is not None
    ]

    def raised(ms: float | None) -> float | None:
        return None if ms is None else max(floor_ms, ms)

    records = [
        {
            **cell,
            "exposed_ms": {key: raised(ms) for key, ms in cell["exposed_ms"].items()},
            "predicted_ms": raised(cell["predicted_ms"]),
        }
        for cell in cells
    ]
    lines = {
        mode: {**look, "marker": "", "alpha": 0.75, "label": f"{look['label']}, predicted" if asis else None}
        for mode, look in _LOOKS.items()
    }
    dashes = {overlap: {**look, "label": None, "marker": "_", "markersize": 15} for overlap, look in _LOOKS.items()}
    marks: list[Mark | Rule] = [
        Mark(curves, "gbps", "ms", "mode", lines),
        Mark(records, "gbps", "exposed_ms", "overlap", _LOOKS, kind="points"),
        Mark(records, "gbps", "predicted_ms", "overlap", dashes, kind="points"),
        *(Rule("x", link.gbps, link.name, {"linestyle": DOTTED}) for link in NAMED_LINKS),
    ]
    if phi:
        marks.append(Rule("x", phi, f"Φ = {phi:.2g} Gbit/s", {"color": INK, "linestyle": "-", "linewidth": 1.3}))
    x, y, limits = "bandwidth of the link, Gbit/s", "exposed transfer time, ms", (rates[0], rates[-1])
    return Picture(
        "exposed_over_bandwidth",
        "Exposed transfer time over bandwidth",
        f"Points are means with 95 % intervals; the link was shaped: {summary['shaping']}. Lines are the prediction, "
        "including the fixed cost of a hand-off, for the mean prefill time of all cells; a short dash is that "
        "for the prefill time of its cell. Right of Φ, overlap hides nearly all of the transfer; left of it, no "
        "overlap can. Dotted lines mark the nominal rates of named links, without their round trips.",
        [Panel(marks, x, y, log="xy", legend="above", xlim=limits, ylim=(floor_ms, None))],
        height_in=5.4,
    )
