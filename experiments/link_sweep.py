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

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from experiments.deployment import Deployment
from experiments.experiment import Bench, Cell, Options, option
from experiments.hosts import MTU, PAYLOAD_SHARE, NamespaceDeployment
from experiments.modes import LinkModel, ModeMatrix, PairOptions, added_ms, pair_figures, pairs_of
from experiments.report.drawing import DOTTED, INK, MARKERS, PALETTE, Mark, Panel, Picture, Rule, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.statistics import mean_interval
from ops.doctor.handoff_prediction import Overlap
from pdserve.client.status import ServiceStatus
from pdserve.client.target import AccessOptions
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import MIN_VALUES, Interval
from pdserve.core.timeline import Figure

TOLERANCE, TOLERANCE_MS = 0.15, 3.0
"""A prediction is right if it is off by no more than one of these."""
KNEE_SHARE = 0.1
"""The knee is the rate below which more than this share of the prefill time is exposed."""
REACHED = 0.8
"""A link that never moved more than this share of its shaped rate is slower than asked for."""

_CALIBRATION_TOKENS = 2
_OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
USER_SPACE, KERNEL, AS_IT_IS = "user space", "kernel (tc)", "as it is"


@dataclass(frozen=True, slots=True)
class NamedLink:
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
    transport: Literal["tcp", "grpc_stream", "torch_dist"] = Field("tcp", description="transport of the link")
    pairs: int = option(12, ge=1, description="least pairs of requests per cell", quick=6)
    hosts: Literal["local", "namespaces"] = Field(
        "local",
        description="local: the link is shaped in user space; namespaces (as root): prefill and decode run on two "
        "hosts made of network namespaces, and the kernel shapes the cable between them",
    )


class LinkSweep(ModeMatrix):
    """See the module."""

    name: ClassVar[str] = "link-sweep"
    question: ClassVar[str] = "How fast does the link between prefill and decode have to be?"
    options_type: ClassVar[type[LinkSweepOptions]] = LinkSweepOptions
    options: LinkSweepOptions

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.prompt_len = self.options.prompt_len
        self._namespaces: NamespaceDeployment | None = None

    def deployment(
        self,
        target: str | None,
        *,
        access: AccessOptions,
        config: Path | None,
        settings: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> Deployment:
        """Services on this host, or on two hosts made of namespaces."""
        if self.options.hosts == "local":
            return super().deployment(target, access=access, config=config, settings=settings, report=report)
        if target is not None:
            raise InvalidRequest("--hosts: namespaces starts services itself, and --target names a running one")
        self._namespaces = NamespaceDeployment(access=access, config=config, settings=settings, report=report)
        return self._namespaces

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per rate and overlap, and per round trip and overlap; for a running service a single one."""
        options = self.options
        if attached is not None:
            if not any(worker.links for worker in attached.workers):
                raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
            if options.prompt_len + self.output_len > attached.context_length:
                raise InvalidRequest(f"--prompt-len: does not fit the service's context of {attached.context_length}")
            parameters = {"gbps": None, "rtt_ms": None, "overlap": "as-configured", "shaping": AS_IT_IS}
            return [Cell("as-configured", parameters, work=options.pairs, sending_s=options.pairs_s)]
        for name, values in (("--gbps", options.gbps), ("--round-trips-ms", options.round_trips_ms)):
            if any(value <= 0 for value in values):
                raise InvalidRequest(f"{name}: {min(values):g} is not above 0")
        if not options.gbps:
            raise InvalidRequest("--gbps: give at least one rate")
        points = [(gbps, 0.0) for gbps in options.gbps]
        if options.round_trips_ms and options.round_trip_gbps not in options.gbps:
            points.append((options.round_trip_gbps, 0.0))
        points += [(options.round_trip_gbps, rtt_ms) for rtt_ms in options.round_trips_ms]
        if options.hosts == "namespaces":  # what shares a service comes together: only the rate changes while it runs
            points.sort(key=lambda point: point[1])
        return [self._cell(gbps, rtt_ms, overlap) for overlap in options.overlaps for gbps, rtt_ms in points]

    def _cell(self, gbps: float, rtt_ms: float, overlap: Overlap) -> Cell:
        options, kernel = self.options, self.options.hosts == "namespaces"
        service: dict[str, Any] = {
            "transfer.transport": options.transport,
            "transfer.overlap": overlap,
            "engine.max_num_batched_tokens": options.chunk_tokens,
        }
        if not kernel:
            service["transfer.shape_gbps"] = gbps
        if rtt_ms:
            service["transfer.shape_round_trip_ms"] = rtt_ms
        parameters = {"gbps": gbps, "rtt_ms": rtt_ms, "overlap": overlap, "shaping": KERNEL if kernel else USER_SPACE}
        name = f"{gbps:g}-gbps/{rtt_ms:g}-ms/{overlap}"
        return Cell(name, parameters, service, options.pairs, options.pairs_s)

    async def measure(self, bench: Bench) -> None:
        """Shape the cable between hosts made of namespaces, then calibrate and send the pairs."""
        if self._namespaces is not None:
            self._namespaces.rate(bench.cell.parameters["gbps"])
        await super().measure(bench)

    def least_pairs(self) -> int:
        """As the options say."""
        return self.options.pairs

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``cells``, one each: ``cell``, ``gbps``, ``rtt_ms``, ``overlap``, ``shaping``, ``n``, ``errors``;
        ``exposed`` in ms; ``added_ttft`` and ``added_ttft_decode`` of the pairs; ``predicted_ms``, ``off_ms``
        (measured minus predicted), ``within`` (at most 15 % or 3 ms); ``phi_gbs`` in 10^9 bytes per second, with the
        ``prefill_ms`` of the cell; ``fixed_ms``, ``link_gbs`` (for payload); ``ceiling_gbs``, measured when the link
        was opened, and ``reached``, whether anything moved at 80 % of the shaped rate; if not, the prediction takes
        the best rate that was measured; ``wire_ms``, ``clock_error_ms``; ``transports_used``, ``kv_bytes``,
        ``kv_bytes_expected``, ``kv_bytes_equal``, ``tokens_equal``.

        ``knee`` by overlap mode: ``threshold_ms`` (a tenth of the prefill time), ``measured_gbps``, below which more
        than that is exposed (null with the reason in ``measured``), ``predicted_gbps``, ``phi_gbps``. ``phi_gbps``:
        with the mean prefill time, in 10^9 bits per second. ``model``: what the lines are drawn from. ``links``:
        nominal links with ``name``, ``gbps``, ``rtt_ms``, ``times_phi`` and ``predicted_exposed_ms``."""
        cells = [each for cell in run.cells if (each := self._summarise_cell(cell, run)) is not None]
        known = next((cell for cell in run.cells if cell.facts.get("layout")), None)
        model = None
        if known is not None and cells:
            mean_prefill_ms = statistics.fmean(cell["prefill_ms"] for cell in cells)
            model = LinkModel.of(known, self.options.prompt_len, mean_prefill_ms)
        overlaps = list(dict.fromkeys(cell["overlap"] for cell in cells))
        return {
            "experiment": self.name,
            "shaping": cells[0]["shaping"] if cells else None,
            "cells": cells,
            "knee": {}
            if model is None or known is None
            else {each: _knee(each, known.config.transfer.overlap, cells, model) for each in overlaps},
            "phi_gbps": None if model is None else round(8 * model.phi_gbs, 6),
            "model": None if model is None else asdict(model),
            "links": [] if model is None else [_on_link(link, model) for link in NAMED_LINKS],
            "failed": self.failed(run),
        }

    def _summarise_cell(self, cell: FinishedCell, run: RunData) -> dict[str, Any] | None:
        pairs, errors = pairs_of(run.rows_of(cell.cell))
        if not pairs:
            return None
        pd_rows = [pd for pd, _ in pairs]
        shaping, shaped_gbps = cell.parameters["shaping"], cell.parameters["gbps"]
        ceiling_gbs = statistics.median(float(row.transfer.get("ceiling_gbs", 0.0)) for row in pd_rows)
        rtt_ms = cell.parameters["rtt_ms"]
        if rtt_ms is None:  # the mean round trip between the gateway and the two workers bounds the clocks' error
            rtt_ms = min(row.clock_error_ms for row in pd_rows)
        # A slow link is measured with a single payload when it is opened, so the requests' own rates count as well.
        best_gbs = max(ceiling_gbs, *(_rate_gbs(row) for row in pd_rows))
        reached = shaped_gbps is None or 8 * best_gbs >= REACHED * shaped_gbps
        link_gbs = ceiling_gbs if shaped_gbps is None else shaped_gbps / 8 if reached else best_gbs
        if shaping == KERNEL:
            link_gbs *= PAYLOAD_SHARE
        prefill_ms = statistics.fmean(row.stages_ms[Figure.TTFT_DECODE].get("prefill", 0.0) for row in pd_rows)
        exposed = mean_interval([float(row.transfer.get("exposed_ms", 0.0)) for row in pd_rows], self.options.seed)
        assert exposed is not None
        predicted_ms = fixed_ms = phi_gbs = None
        if cell.facts.get("layout") is not None and link_gbs:
            link = LinkModel.of(cell, self.options.prompt_len, prefill_ms)
            overlap = cell.parameters["overlap"]
            if overlap == "as-configured":
                overlap = cell.config.transfer.overlap
            fixed_ms = _fixed_ms(cell, link, overlap, link_gbs, rtt_ms)
            predicted_ms = link.exposed_ms(overlap, link_gbs, rtt_ms) + fixed_ms
            phi_gbs = link.phi_gbs
        off_ms = None if predicted_ms is None else exposed.value - predicted_ms
        return {
            "cell": cell.cell,
            **cell.parameters,
            "gbps": shaped_gbps if shaped_gbps is not None else round(8 * ceiling_gbs, 6),
            "rtt_ms": round(rtt_ms, 6),
            **pair_figures(run.rows_of(cell.cell), pairs, errors),
            "exposed": exposed.to_dict(),
            **{f"added_{figure.value}": added_ms(pairs, figure) for figure in Figure},
            "predicted_ms": None if predicted_ms is None else round(predicted_ms, 4),
            "off_ms": None if off_ms is None else round(off_ms, 4),
            "within": None
            if off_ms is None or predicted_ms is None
            else abs(off_ms) <= max(TOLERANCE * predicted_ms, TOLERANCE_MS),
            "phi_gbs": None if phi_gbs is None else round(phi_gbs, 6),
            "prefill_ms": round(prefill_ms, 4),
            "fixed_ms": None if fixed_ms is None else round(fixed_ms, 4),
            "ceiling_gbs": round(ceiling_gbs, 6),
            "link_gbs": round(link_gbs, 6),
            "reached": reached,
            "wire_ms": round(statistics.fmean(float(row.transfer.get("wire_ms", 0.0)) for row in pd_rows), 4),
            "clock_error_ms": round(max(row.clock_error_ms for row in pd_rows), 4),
            "transports_used": sorted({row.transport for row in pd_rows}),
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The curves over bandwidth and round trip, what named links would expose, and a table of all cells."""
        cells: list[Mapping[str, Any]] = summary["cells"]
        report = Report(
            title="How fast the link has to be",
            question=self.question,
            answer=_answer(summary),
            setup=setup_of(run, _method(self.options, summary["shaping"])),
            caveats=_caveats(summary),
            failures=summary["failed"],
        )
        if not cells:
            return report
        model = None if summary["model"] is None else LinkModel(**summary["model"])
        report.blocks.append(_bandwidth_picture(summary, model))
        if len({cell["gbps"] for cell in cells}) > 1:
            report.blocks.append(_added_picture(summary))
        over_rtt = [cell for cell in cells if cell["gbps"] == self.options.round_trip_gbps]
        if len({cell["rtt_ms"] for cell in over_rtt}) > 1:
            report.blocks.append(_round_trip_picture(over_rtt, model))
        if summary["links"]:
            report.blocks.append(_links_table(summary))
        report.blocks.append(_table(cells))
        return report


def _rate_gbs(row: RequestRow) -> float:
    """The rate of a request's transfer while bytes of it moved."""
    wire_ms = float(row.transfer.get("wire_ms", 0.0))
    return row.kv_bytes / wire_ms / 1e6 if wire_ms > 0 else 0.0


def _fixed_ms(cell: FinishedCell, model: LinkModel, overlap: Overlap, gbs: float, rtt_ms: float) -> float:
    """What prompts of one block expose beyond the prediction, in the median."""
    beyond_ms = [
        each["exposed_ms"]
        - model.exposed_ms(overlap, gbs, rtt_ms, tokens=_CALIBRATION_TOKENS, prefill_ms=each["prefill_ms"])
        for each in cell.facts.get("calibrations", ())
    ]
    return max(0.0, statistics.median(beyond_ms)) if beyond_ms else 0.0


def _knee(overlap: str, configured: Overlap, cells: Sequence[Mapping[str, Any]], model: LinkModel) -> dict[str, Any]:
    """Where the exposed time rises above `KNEE_SHARE` of the prefill: as measured without a round trip (interpolated
    between two rates on logarithmic scales), by the model, and Φ. Rates in 10^9 bits per second. ``configured`` is what
    the service has where ``overlap`` is as-configured."""
    threshold_ms = KNEE_SHARE * model.prefill_ms
    points = sorted((c["gbps"], c["exposed"]["mean"]) for c in cells if c["overlap"] == overlap and not c["rtt_ms"])
    fixed_ms = [cell["fixed_ms"] for cell in cells if cell["overlap"] == overlap and cell["fixed_ms"] is not None]
    measured, why = _crossing(points, threshold_ms)
    mode = next((each for each in _OVERLAPS if each == overlap), configured)
    predicted = model.rate_of(mode, threshold_ms, statistics.median(fixed_ms) if fixed_ms else 0.0)
    return {
        "threshold_ms": round(threshold_ms, 4),
        "measured_gbps": None if measured is None else round(measured, 6),
        "measured": why,
        "predicted_gbps": None if predicted is None else round(predicted, 6),
        "phi_gbps": round(8 * model.phi_gbs, 6),
    }


def _crossing(points: Sequence[tuple[float, float]], threshold_ms: float) -> tuple[float | None, str]:
    """The highest rate at which the exposed time falls below the threshold, and in words how that is known."""
    if len(points) < 2:
        return None, "that two or more cells would tell"
    for (slow, slow_ms), (fast, fast_ms) in zip(points[-2::-1], points[:0:-1], strict=True):
        if slow_ms > threshold_ms >= fast_ms:
            share = math.log(slow_ms / threshold_ms) / math.log(slow_ms / max(fast_ms, 1e-6))
            return slow * (fast / slow) ** share, "interpolated"
    return None, "below the slowest one" if points[-1][1] <= threshold_ms else "above the fastest one"


def _on_link(link: NamedLink, model: LinkModel) -> dict[str, Any]:
    """What the model says of a named link, without the fixed cost."""
    exposed = {each: round(model.exposed_ms(each, link.gbps / 8, link.rtt_ms), 4) for each in _OVERLAPS}
    return {**asdict(link), "predicted_exposed_ms": exposed, "times_phi": round(link.gbps / 8 / model.phi_gbs, 4)}


def _answer(summary: Mapping[str, Any]) -> str:
    cells = summary["cells"]
    if not cells:
        return "No pair of requests was completed."
    known = [cell for cell in cells if cell["within"] is not None]
    right = f"{sum(cell['within'] for cell in known)} of {len(known)} cells are within 15 % or 3 ms of the prediction."
    if summary["shaping"] == AS_IT_IS:
        (cell,) = cells
        exposed = Interval.from_dict(cell["exposed"])
        phi = "" if cell["phi_gbs"] is None else f"; Φ of this prompt is {8 * cell['phi_gbs']:.3g} Gbit/s"
        return f"Over the link as it is ({cell['gbps']:.3g} Gbit/s at best), {exposed.text()} are exposed{phi}. {right}"
    if summary["phi_gbps"] is None:
        return "The model's layers are unknown on this host, so that nothing could be predicted."
    parts = []
    for overlap, knee in summary["knee"].items():
        measured = knee["measured_gbps"]
        where = f"{measured:.3g} Gbit/s" if measured is not None else f"a rate {knee['measured']}"
        at = "no rate is enough" if knee["predicted_gbps"] is None else f"{knee['predicted_gbps']:.3g} Gbit/s"
        parts.append(f"{where} with overlap {overlap} (by arithmetic: {at})")
    return (
        f"Φ, the rate at which the prompt's KV takes as long as its prefill, is {summary['phi_gbps']:.3g} Gbit/s here. "
        f"More than a tenth of the prefill time is exposed below {'; '.join(parts)}. {right}"
    )


def _method(options: LinkSweepOptions, shaping: str | None) -> str:
    how = {
        USER_SPACE: "the link was shaped in user space, at the transport (transfer.shape_gbps)",
        KERNEL: "prefill and decode on two hosts made of network namespaces; tc (tbf) shaped the cable between them, "
        "round trips were added in user space",
        AS_IT_IS: "a running service, its links as they are",
        None: "nothing was measured",
    }[shaping]
    return (
        f"{how}; prompts of {options.prompt_len} tokens, one request at a time, both modes A B B A; intervals are 95 % "
        "bootstrap"
    )


def _caveats(summary: Mapping[str, Any]) -> list[str]:
    cells, caveats = summary["cells"], []
    if summary["shaping"] == USER_SPACE:
        caveats.append(
            "The shaper is part of the worker: it takes processor time for every piece of a payload, has no congestion "
            "control and loses no packets."
        )
    if summary["shaping"] == KERNEL:
        caveats.append(
            "tc's token bucket lets a burst of a millisecond pass, but at least two frames; the prediction counts "
            f"{MTU - 52} bytes of payload in each frame of {MTU + 14} bytes. Shaping costs time of the sender's core, "
            "so prefills that overlap with a transfer are slower than on hosts whose network card does the work. "
            "Control messages have a cable of their own, which is not shaped."
        )
    if summary["shaping"] == AS_IT_IS:
        caveats.append(
            "The rate is the ceiling that was measured when the link was opened. The round trip is the mean of those "
            "between the gateway and the two workers. The service does not tell its settings: overlap, chunk size, "
            "groups of layers and bytes in flight are assumed to be the defaults."
        )
    if not all(cell["reached"] for cell in cells):
        caveats.append(
            "Some links were slower than they were shaped to; the prediction takes the best rate that was measured."
        )
    if any(cell["n"] < MIN_VALUES for cell in cells):
        caveats.append(f"Cells with fewer than {MIN_VALUES} pairs have no intervals.")
    if cells:
        error_ms = max(cell["clock_error_ms"] for cell in cells)
        caveats.append(f"Exposed times between two workers are known to ± {error_ms:.3f} ms (clock offset).")
    caveats.append(
        "Named links are nominal rates and typical round trips, not measurements; what they expose is arithmetic for "
        "this model on this machine. A faster device has a shorter prefill, and so a larger Φ."
    )
    return caveats


_NAMES = {"none": "serial (none)", "chunk": "chunk-wise", "layer": "layer-wise", "as-configured": "as configured"}
_LOOKS = {
    overlap: {"label": name, "color": PALETTE[number], "marker": MARKERS[number]}
    for number, (overlap, name) in enumerate(_NAMES.items())
}
"""An overlap mode looks the same in every picture."""
_BANDWIDTH = "bandwidth of the link, Gbit/s"


def _line(overlap: str, xs: Iterable[float], predicted: Callable[[float], float], **look: Any) -> Mark:
    """The prediction over ``xs`` as a line."""
    points = [{"x": float(x), "ms": predicted(float(x))} for x in xs]
    return Mark(points, "x", "ms", look={"color": _LOOKS[overlap]["color"], "marker": "", "alpha": 0.75, **look})


def _by_overlap(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The cells of each overlap mode, whose predictions share the fixed cost of a hand-off."""
    overlaps = sorted({cell["overlap"] for cell in cells}, key=list(_NAMES).index)
    return {overlap: [cell for cell in cells if cell["overlap"] == overlap] for overlap in overlaps}


def _predicted_at(
    model: LinkModel, mode: Overlap, series: Sequence[Mapping[str, Any]], gbps: float, rtt_ms: float
) -> float:
    """What a prompt exposes at a rate and round trip, with the fixed cost of the cells ``series``."""
    return model.exposed_ms(mode, gbps / 8, rtt_ms) + statistics.median(cell["fixed_ms"] or 0.0 for cell in series)


def _marks(cells: Sequence[Mapping[str, Any]], x: str, floor: float = 0.0) -> list[Mark]:
    """Exposed times with their intervals, and a dash for the prediction of each cell; none below ``floor``."""
    raised = [
        {
            **cell,
            "exposed": {key: max(floor, ms) if ms is not None else None for key, ms in cell["exposed"].items()},
            "predicted_ms": None if cell["predicted_ms"] is None else max(floor, cell["predicted_ms"]),
        }
        for cell in cells
    ]
    dash = {overlap: {**look, "label": None, "marker": "_"} for overlap, look in _LOOKS.items()}
    return [
        Mark(raised, x, "exposed", by="overlap", looks=_LOOKS, kind="points"),
        Mark(raised, x, "predicted_ms", by="overlap", looks=dash, kind="points", look={"markersize": 15}),
    ]


def _bandwidth_picture(summary: Mapping[str, Any], model: LinkModel | None) -> Picture:
    """Exposed time over the rate: predicted lines, measured points, Φ, and marks of named links."""
    cells = [cell for cell in summary["cells"] if not cell["rtt_ms"] or cell["shaping"] == AS_IT_IS]
    means = [cell["exposed"]["mean"] for cell in cells if cell["exposed"]["mean"] > 0]
    floor_ms, phi = min(0.5 * min(means, default=1.0), 1.0), summary["phi_gbps"]
    shown = [*(cell["gbps"] for cell in cells), *(link.gbps for link in NAMED_LINKS), phi or NAMED_LINKS[0].gbps]
    rates = np.geomspace(0.5 * min(shown), 2 * max(shown), 200)
    marks: list[Mark | Rule] = []
    for overlap, series in _by_overlap(cells).items() if model else ():
        configured = overlap == "as-configured"
        for mode in _OVERLAPS if configured else [each for each in _OVERLAPS if each == overlap]:
            label = {"label": f"{_NAMES[mode]}, predicted"} if configured else {}
            assert model is not None
            marks.append(_line(mode, rates, partial(_predicted_at, model, mode, series, rtt_ms=0.0), **label))
    marks += [*_marks(cells, "gbps", floor_ms)]
    marks += (
        [Rule("x", phi, f"Φ = {phi:.2g} Gbit/s", {"color": INK, "linestyle": "-", "linewidth": 1.3})] if phi else []
    )
    marks += [Rule("x", link.gbps, link.name, {"linestyle": DOTTED}) for link in NAMED_LINKS]
    return Picture(
        "exposed_over_bandwidth",
        "Exposed transfer time over bandwidth",
        f"Points are means with 95 % intervals; the link was shaped: {summary['shaping']}. Lines are the prediction, "
        "including the fixed cost of a hand-off, for the mean prefill time of all cells; a short dash is that "
        "for the prefill time of its cell. Right of Φ, overlap hides nearly all of the transfer; left of it, no "
        "overlap can. Dotted lines mark the nominal rates of named links, without their round trips.",
        [
            Panel(
                marks,
                x=_BANDWIDTH,
                y="exposed transfer time, ms",
                log="xy",
                xlim=(rates[0], rates[-1]),
                ylim=(floor_ms, None),
                legend="above",
            )
        ],
        height_in=5.4,
    )


def _added_picture(summary: Mapping[str, Any]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the rate."""
    cells = [cell for cell in summary["cells"] if not cell["rtt_ms"]]
    phi = [Rule("x", summary["phi_gbps"], look={"color": INK, "linestyle": "-"})] if summary["phi_gbps"] else []
    panels = [
        Panel(
            [Mark(cells, "gbps", f"added_{figure.value}", by="overlap", looks=_LOOKS), *phi, Rule("y")],
            x=_BANDWIDTH,
            y="added, ms",
            title=f"added {figure.value}",
            log="x",
            ticks=[cell["gbps"] for cell in cells],
            legend="best" if figure is Figure.TTFT else "",
        )
        for figure in Figure
    ]
    return Picture(
        "added_over_bandwidth",
        "Added latency over bandwidth",
        "Median of the paired differences, disaggregated minus colocated, with 95 % intervals. Left: token 1, which "
        "does not wait for the hand-off. Right: token 2, which does. The vertical line is Φ.",
        panels,
        columns=2,
        share={"sharey": True},
    )


def _round_trip_picture(cells: Sequence[Mapping[str, Any]], model: LinkModel | None) -> Picture:
    """Exposed time and added ``ttft_decode`` over the round trip, at one rate."""
    trips_ms = np.linspace(0.0, max(cell["rtt_ms"] for cell in cells), 50)
    lines = [
        _line(overlap, trips_ms, partial(_predicted_at, model, series[0]["overlap"], series, 8 * series[0]["link_gbs"]))
        for overlap, series in _by_overlap(cells).items()
        if model is not None
    ]
    added = Mark(cells, "rtt_ms", "added_ttft_decode", by="overlap", looks=_LOOKS, kind="points")
    return Picture(
        "over_round_trip",
        f"Over the round trip, at {cells[0]['gbps']:g} Gbit/s",
        "Left: the exposed transfer time, with the prediction as a line and, for the cell's own prefill, a dash. "
        "Right: what token 2 waits for in all. A hand-off needs half a round trip, because decode has announced the "
        "destination before; the window of unacknowledged bytes bounds the rate on long links.",
        [
            Panel(
                [*lines, *_marks(cells, "rtt_ms")], x="round trip, ms", y="exposed, ms", title="exposed", legend="best"
            ),
            Panel([added, Rule("y")], x="round trip, ms", y="added ttft_decode, ms", title="added ttft_decode"),
        ],
        columns=2,
    )


def _links_table(summary: Mapping[str, Any]) -> TableBlock:
    columns = (
        "link | name",
        "Gbit/s | gbps:g",
        "round trip, ms | rtt_ms:g",
        "times Φ | times_phi:.3g",
        *(f"exposed with {each}, ms | predicted_exposed_ms.{each}:.3g" for each in _OVERLAPS),
    )
    caption = (
        "Nominal rates and typical round trips. Exposed times are predicted, without the fixed cost of a hand-off."
    )
    return table("What named links would expose", summary["links"], columns, caption)


def _table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    columns = (
        "cell",
        "shaped by | shaping",
        "n",
        "exposed, ms | exposed",
        "predicted, ms | predicted_ms:.2f",
        "within 15 % or 3 ms | within:yes|no",
        "added ttft_decode, ms | added_ttft_decode:+",
        "prefill, ms | prefill_ms:.1f",
        "fixed, ms | fixed_ms:.2f",
        "ceiling, GB/s | ceiling_gbs:.4g",
        "KV, bytes | bytes:,",
        "= expected | kv_bytes_equal",
        "tokens equal | tokens_equal",
    )
    records = [{**cell, "bytes": cell["kv_bytes"] // cell["n"]} for cell in cells]
    return table("All cells", records, columns, "KV bytes per request; ceiling as measured when the link was opened.")
