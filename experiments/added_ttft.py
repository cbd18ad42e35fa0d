"""``pdserve experiment added-ttft``: what disaggregation adds to the time to first token, and which stages it goes to.

Idle cells send the same prompt in both modes, one request at a time, in the order A B B A. So the difference is the
hand-off's and not that of a queue. The added time is the median of the pairs' differences. A *cause* is the mean
difference of a stage over the middle half of the pairs, whose differences lie around the median; the causes and what
they leave unexplained sum to the added ``ttft_decode``.

Cells under load send the same Poisson arrivals and prompts in each mode, one mode after the other
(`experiments.modes`). Their causes are the differences of the arms' means; waiting has stages of its own there.

The prediction of the exposed transfer time is arithmetic: the prompt's bytes over the measured ceiling of the link, in
the parts that the overlap mode makes of them (`ops.doctor.handoff_prediction`), plus the fixed cost of a hand-off. The
fixed cost is measured on the same link with prompts of one block before the cell. The arithmetic is that of an idle
link, under load as well."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from experiments.experiment import Cell, option
from experiments.matrix import (
    IDLE,
    ModeMatrix,
    attainment_panel,
    cell_caveats,
    check_loads,
    idle_table,
    load_table,
    sustains,
    unclear_text,
    under_load,
)
from experiments.modes import ARMS, ATTAINMENT, COLOCATED, PD, SLO, LoadPlan, PairOptions, added_text, slo_text
from experiments.report.drawing import ARM_LOOKS, PALETTE, Mark, Panel, Picture, Rule, TableBlock
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, FinishedCell, Parameters, RunData
from experiments.workloads.conversation import Room, Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.machine_load import beside_text
from ops.waterfall.bars import COLORS
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import CONFIDENCE, Interval, apart
from pdserve.core.timeline import UNATTRIBUTED, Figure

WIDTHS = ("mha", "gqa", "mla", "mqa")
"""Shapes of one model with KV caches of different widths: a Llama of 12 heads of 48 dimensions and 30 layers, with 12,
4, 2 and 1 KV heads. All have random weights, so that nothing but the shape matters. ``mla`` has the cache size of
multi-head latent attention, not its computation: DeepSeek-V2 caches 4.5 times the head dimension per token and layer
(216 values here); two KV heads cache 192."""
_SHAPES = Path(__file__).parent / "shapes"
_HEADLINE_LEN = 512
"""The answer is about this prompt length, or the nearest one that was measured; KV widths are compared at it."""
_METHOD = (
    "the same prompts in both modes, one request at a time, A B B A; the added time is the median of the differences, "
    f"with a {100 * CONFIDENCE:.0f} % interval from their order; pairs are added until it is narrow or the time is over"
)


class AddedTtftOptions(PairOptions):
    """Options of `AddedTtft`."""

    prompt_lens: tuple[PositiveInt, ...] = option(
        (128, 512, 1024, 2048), description="prompt lengths in tokens", quick=[128, 512]
    )
    transports: tuple[str, ...] = option(("shm", "tcp"), description="transports to compare", quick=["shm"])
    overlaps: tuple[Literal["none", "chunk", "layer"], ...] = option(
        ("layer", "chunk", "none"),
        description="overlap modes to compare (see transfer.overlap)",
        quick=["layer"],
    )
    pairs: int = Field(12, ge=1, description="least pairs of requests per idle cell")
    widths: tuple[str, ...] = option(
        WIDTHS, description="KV widths of one model to compare (mha, gqa, mla, mqa; '' for none)", quick=[]
    )
    first_tokens: tuple[Literal["prefill", "decode"], ...] = option(
        ("prefill", "decode"),
        description="settings of router.first_token to compare, at the prompt length nearest to 512",
        quick=["prefill"],
    )
    rates: tuple[float, ...] = option(
        (1.0, 2.0, 4.0),
        description="loads in requests/s ('' for none)",
        quick=[1.0, 3.0],
    )
    load_combinations: Literal["first", "transports", "all"] = option(
        "transports",
        description="what is measured under load: the first transport and overlap; every transport with the first "
        "overlap; or all transports with all overlaps",
        quick="first",
    )
    load_prompt_lens: tuple[PositiveInt, ...] = Field(
        (), description="prompt lengths under load (none: of --prompt-lens the one nearest to 512, and the longest)"
    )
    load_output_len: int = option(32, ge=2, description="tokens that a request generates under load", quick=16)
    slo: str = Field(
        "auto",
        description="limits in ms under load: ttft=200,itl=50 (ttft_decode, tpot, e2e); auto: twice the idle colocated "
        "TTFT and gap between tokens",
    )
    duration_s: float = option(6.0, gt=0, le=86_400, description="seconds of each load", quick=3.0)
    rounds: int = option(6, ge=2, description="loads of each mode per cell", quick=2)


class AddedTtft(ModeMatrix):
    """See the module."""

    name = "added-ttft"
    question = "How much does disaggregation add to the time to first token, and where does it go?"
    options_type = AddedTtftOptions
    fixed_options: ClassVar[Parameters] = {"width_prompt_len": _HEADLINE_LEN}
    options: AddedTtftOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """Idle cells of every prompt length, transport and overlap; cells under load with those that
        ``load_combinations`` names; the other settings of ``router.first_token`` with the first transport and overlap;
        one cell per KV width. For a running service: the idle cells and those under load, with the transport and the
        model that it has."""
        options = self.options
        check_loads(options.rates, options.slo)
        for name in ("prompt_lens", "transports", "overlaps"):
            if not getattr(options, name):
                raise InvalidRequest(f"--{name.replace('_', '-')}: is empty")
        if unknown := [width for width in options.widths if width not in WIDTHS]:
            raise InvalidRequest(f"--widths: {unknown[0]!r} is none of {', '.join(WIDTHS)}")
        lengths, most = list(options.prompt_lens), 2**63
        pairs = list(itertools.product(options.transports, options.overlaps))
        services = [{"transfer.transport": transport, "transfer.overlap": overlap} for transport, overlap in pairs]
        if attached is not None:
            most, services = Room.of(attached).tokens, [{}]
            pairs = [("+".join(sorted(linked_transports(attached))), "as-configured")]  # type: ignore[list-item]
            lengths = [length for length in lengths if length + _PAIR_TOKENS <= most]
            if not lengths:
                raise InvalidRequest(f"--prompt-lens: none fits the {most} tokens of the service")
        loaded = options.load_prompt_lens or sorted({_nearest(lengths), max(lengths)})
        loaded = [length for length in loaded if length + options.load_output_len <= most]
        if options.rates and options.slo == "auto" and (missing := [each for each in loaded if each not in lengths]):
            raise InvalidRequest(
                f"--load-prompt-lens: the automatic SLO needs idle requests of {missing[0]} tokens; add the length to "
                "--prompt-lens, give --slo, or measure no load with --rates ''"
            )
        cells: list[Cell] = []
        for (transport, overlap), service in zip(pairs, services, strict=True):
            place = {"transport": transport, "overlap": overlap}
            cells += [self._pairs("", length, place, service) for length in lengths]
            first = overlap == pairs[0][1], (transport, overlap) == pairs[0]
            if {"transports": first[0], "first": first[1], "all": True}[options.load_combinations]:
                cells += [
                    self.cell(
                        f"{length}/{transport}/{overlap}/rate-{rate:g}",
                        {"prompt_len": length, **place, "load": f"rate-{rate:g}", "rate": rate},
                        service,
                    )
                    for length in loaded
                    for rate in options.rates
                ]
        if attached is not None:
            return cells
        place, service = dict(zip(("transport", "overlap"), pairs[0], strict=True)), services[0]
        if "decode" in options.first_tokens:
            late = {**service, "router.first_token": "decode"}
            cells.append(
                self._pairs("first-token-decode/", _nearest(lengths), {**place, "first_token": "decode"}, late)
            )
        for width in options.widths:
            shaped = {"model.path": f"dummy:{_SHAPES / width / 'config.json'}", **service}
            cells.append(self._pairs(f"width-{width}/", _HEADLINE_LEN, {**place, "width": width}, shaped))
        return cells

    def _pairs(self, prefix: str, length: int, place: Parameters, service: Mapping[str, Any]) -> Cell:
        name = f"{prefix}{length}/{place['transport']}/{place['overlap']}{'' if prefix else '/idle'}"
        return self.cell(name, {"prompt_len": length, **place, "load": IDLE}, service, self.options.pairs)

    def load(self, parameters: Parameters) -> LoadPlan:
        """As the options say."""
        return LoadPlan(parameters["rate"], self.options.duration_s, self.options.rounds, self.options.seed)

    def workload(self, parameters: Parameters) -> Workload:
        """Random prompts of one length."""
        output_len = self.options.load_output_len if under_load(parameters) else _PAIR_TOKENS
        return Synthetic(Fixed(parameters["prompt_len"]), Fixed(output_len))

    def slo(self, cell: FinishedCell, run: RunData) -> SLO | None:
        """An automatic one comes from the idle cell that is like it otherwise."""
        return slo_alike(self.options.slo, cell, run)

    def found(self, cells: Sequence[Figures], run: RunData) -> dict[str, Any]:
        """The keys of `break_even_of`."""
        return break_even_of([cell for cell in cells if under_load(cell)])

    def report(self, run: RunData, summary: Figures) -> Report:
        """See `report_of`."""
        load = f"Poisson arrivals, {self.options.duration_s:g} s per mode and round, each mode alone"
        return report_of("What disaggregation adds to TTFT", self.question, load, run, summary)


_PAIR_TOKENS = 3
"""Tokens that the requests of pairs generate."""


def linked_transports(status: ServiceStatus) -> set[str]:
    """The transports of a running service. InvalidRequest if it has no links."""
    transports = {link.transport for worker in status.workers for link in worker.links}
    if not transports:
        raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
    return transports


def slo_alike(text: str, cell: FinishedCell, run: RunData) -> SLO | None:
    """The SLO that ``text`` names for a cell under load, by the idle cell with otherwise equal parameters."""
    alike = {**{key: value for key, value in cell.parameters.items() if key != "rate"}, "load": IDLE}
    return SLO.chosen(text, [row for each in run.cells if each.parameters == alike for row in run.rows_of(each.cell)])


def break_even_of(loaded: Sequence[Figures]) -> dict[str, Any]:
    """``break_even``: of all places (transport and overlap) the one at the shortest prompts, and there at the lowest
    rate: ``cell``, ``prompt_len``, ``rate``, place, ``slo_ms``, ``attainment`` by arm, ``distinct`` (whether the
    intervals of both shares are apart), ``only_pd`` and ``neither`` (the cells from there on that only ``pd`` sustains,
    and that neither does). ``break_even_reason``: null, or why there is none. ``break_evens``: an entry per place."""
    judged = [cell for cell in loaded if cell["slo_ms"]]
    found = [
        {**_named(place), **_break_even([cell for cell in judged if place_of(cell) == place])}
        for place in dict.fromkeys(map(place_of, judged))
    ]
    points = [each["break_even"] for each in found if each["break_even"] is not None]
    reasons = dict.fromkeys(each["reason"] for each in found)
    if not found:
        reasons = {
            "there is no SLO: the idle cells were not measured"
            if loaded
            else "no load was measured: give --rates": None
        }
    elif len(reasons) > 1:
        reasons = {f"{', '.join(place_of(each))}: {each['reason']}": None for each in found}
    return {
        "break_even": min(points, key=lambda point: (point["prompt_len"], point["rate"]), default=None),
        "break_even_reason": None if points else "; ".join(reasons),
        "break_evens": found,
    }


def _break_even(judged: Sequence[Figures]) -> dict[str, Any]:
    """From which prompt length and rate on only pd sustains the load, at one place (``break_even``), or the ``reason``
    why there is none.

    The point is a cell that pd sustains and colocated does not. Of the cells with prompts and rates at least as large,
    colocated sustains none: pd alone sustains them, or, further up, neither does. Of several such points it is the one
    with the shortest prompts, and there the lowest rate."""

    def onwards(cell: Figures, among: Sequence[Figures]) -> list[Figures]:
        return [c for c in among if c["prompt_len"] >= cell["prompt_len"] and c["rate"] >= cell["rate"]]

    pd, colocated = ([cell for cell in judged if sustains(cell, arm)] for arm in ARMS)
    won = sorted((cell for cell in pd if cell not in colocated), key=lambda cell: (cell["prompt_len"], cell["rate"]))
    for cell in won:
        if onwards(cell, colocated):
            continue
        shares, further = cell["attainment"], onwards(cell, judged)
        point = {
            **{key: cell[key] for key in ("cell", "prompt_len", "rate", "slo_ms")},
            **_named(place_of(cell)),
            "attainment": {arm: shares[arm]["mean"] for arm in ARMS},
            "distinct": apart(shares[PD], shares[COLOCATED]) > 0,
            "only_pd": [each["cell"] for each in further if each in won],
            "neither": [each["cell"] for each in further if each not in won],
        }
        return {"break_even": point, "reason": None}
    share = f"(at least {100 * ATTAINMENT:.0f} % of the requests within the SLO)"
    if won:
        against = onwards(won[0], colocated)[0]["cell"]
        reason = (
            f"only pd sustained {won[0]['cell']}, but with prompts and rate at least as large colocated sustained "
            f"{against} too"
        )
    elif len(colocated) == len(judged):
        reason = f"colocated sustained every one of the {len(judged)} measured loads {share}"
    elif not pd:
        reason = f"pd sustained none of the {len(judged)} measured loads {share}"
    else:
        reason = f"colocated sustained every load that pd sustained {share}"
    return {"break_even": None, "reason": reason}


def place_of(cell: Figures) -> tuple[str, ...]:
    """The parameters of a cell beside its prompts and load."""
    return tuple(cell[key] for key in ("workers", "transport", "overlap") if key in cell)


def _named(place: Sequence[str]) -> dict[str, str]:
    return dict(zip(("workers", "transport", "overlap")[-len(place) :], place, strict=True))


def report_of(title: str, question: str, load: str, run: RunData, summary: Figures) -> Report:
    """The waterfall of causes, the curves over length, prediction against measurement, attainment under load, KV
    widths, and tables. ``load`` says in words how loads were sent."""
    cells: Sequence[Figures] = summary["cells"]
    idle, loaded = ([cell for cell in cells if under_load(cell) == which] for which in (False, True))
    caveats = ["An idle service has no queues: what disaggregation saves or costs under load is not in the idle cells."]
    if loaded:
        caveats.append(
            "Predictions are of an idle link and an idle decode worker, under load as well. What is exposed beyond "
            "them there waited for other hand-offs, for room in decode's pool, or for a core."
        )
    if any(cell["predicted_ms"] is None for cell in idle):
        caveats.append("No prediction where the link was not measured or the model's layers are unknown on this host.")
    return Report(
        title=title,
        question=question,
        answer=" ".join(filter(None, (_answer(idle, run), _answer_under_load(summary, loaded)))),
        setup=[*setup_of(run, _METHOD), *([("load", load)] if loaded else [])],
        caveats=[*caveats, *cell_caveats(cells)],
        failures=summary["failed"],
        blocks=_blocks(summary, idle, loaded),
    )


def _blocks(summary: Figures, idle: Sequence[Figures], loaded: Sequence[Figures]) -> list[Picture | TableBlock]:
    idle = [
        {**cell, "series": " · ".join(place_of(cell)), "megabytes": cell["kv_bytes"] / cell["n"] / 1e6} for cell in idle
    ]
    plain, widths = [cell for cell in idle if _plain(cell)], [cell for cell in idle if "width" in cell]
    late = [cell for cell in idle if "first_token" in cell]
    blocks: list[Picture | TableBlock] = []
    if plain:
        blocks += [_waterfall(_headline(plain)), _over_length(plain)]
        if known := [cell for cell in plain if cell["predicted_ms"] is not None]:
            blocks.append(_predicted(known))
        blocks.append(_three_times(plain))
        if late:
            blocks.append(_first_tokens(_headline(plain), late[0]))
    if explained := [cell for cell in loaded if cell["causes_ms"] is not None]:
        point, headline = summary["break_even"] or {}, _headline(explained)
        alike = [c for c in explained if (c["prompt_len"], place_of(c)) == (headline["prompt_len"], place_of(headline))]
        highest = max(alike, key=lambda cell: float(cell["rate"]))
        blocks.append(_waterfall(next((cell for cell in explained if cell["cell"] == point.get("cell")), highest)))
    if any(cell["slo_ms"] for cell in loaded):
        blocks.append(_attainment(loaded))
    if len(widths) > 1:
        blocks.append(_over_width(widths))
    return [*blocks, *([idle_table(idle)] if idle else []), *([load_table(loaded)] if loaded else [])]


def _nearest(lengths: Sequence[int]) -> int:
    return min(lengths, key=lambda each: abs(each - _HEADLINE_LEN))


def _plain(cell: Figures) -> bool:
    """Whether an idle cell belongs to the comparison of lengths, transports and overlaps."""
    return "width" not in cell and "first_token" not in cell


def _headline(cells: Sequence[Figures]) -> Figures:
    """The cell that the answer is about: the first transport and overlap, at 512 tokens or the nearest length."""
    first = [cell for cell in cells if place_of(cell) == place_of(cells[0])]
    return min(first, key=lambda cell: abs(cell["prompt_len"] - _HEADLINE_LEN))


def _answer(idle: Sequence[Figures], run: RunData) -> str:
    cells = [cell for cell in idle if _plain(cell)] or idle
    if not cells:
        return "No pair of requests was completed."
    cell = _headline(cells)
    token_1, token_2 = (added_text(f"token {n}", cell["added_ttft_ms"][each]) for n, each in enumerate(Figure, 1))
    beside = f" ({text})" if (text := beside_text(cell)) else ""
    sentences = [
        f"With prompts of {cell['prompt_len']} tokens over {cell['transport']} on an idle service{beside}, {token_1}, "
        f"and {token_2}, the first that waits for the hand-off.",
        unclear_text(cell, run),
    ]
    if Interval.from_dict(cell["added_ttft_ms"][Figure.TTFT_DECODE]).sign:
        known = [cause for cause in cell["causes_ms"].items() if abs(cause[1]) > cell["clock_error_ms"]]
        named = " and ".join(f"{name} ({ms:+.2f} ms)" for name, ms in sorted(known, key=lambda c: -abs(c[1]))[:2])
        largest = f"The largest causes are {named}; together" if named else "No cause exceeds the clock error; together"
        sentences.append(f"{largest} the stages explain {cell['explained_pct']:.0f} % of what token 2 waits longer.")
    sentences += [
        f"With prompts of {other['prompt_len']} tokens, {added_text('token 2', added)}."
        for other in cells
        if other is not cell and place_of(other) == place_of(cell)
        if Interval.from_dict(added := other["added_ttft_ms"][Figure.TTFT_DECODE]).sign
    ]
    return " ".join(filter(None, sentences))


def _answer_under_load(summary: Figures, loaded: Sequence[Figures]) -> str:
    if not loaded:
        return ""
    found = summary["break_even"]
    if found is None:
        return f"Under load no break-even was found: {summary['break_even_reason']}."
    shares, only_pd, neither = found["attainment"], len(found["only_pd"]), len(found["neither"])
    pays = "it pays" if found["distinct"] else "it was not shown to pay; in the measurement it does"
    chance = "" if found["distinct"] else " Their intervals overlap or are missing, so this may be chance."
    others = [each for each in summary["break_evens"] if each["break_even"] is None]
    return (
        f"Under load ({', '.join(place_of(found))}) {pays} from prompts of {found['prompt_len']} tokens at "
        f"{found['rate']:g} requests/s on: there {shares[PD]:.0%} of the disaggregated requests meet the SLO "
        f"({slo_text(found['slo_ms'])}), and {shares[COLOCATED]:.0%} of the colocated ones. Of the {only_pd + neither} "
        f"measured loads from there on, only disaggregated requests meet it in {only_pd}, and neither in {neither}."
        + chance
        + "".join(f" With {', '.join(place_of(each))}: {each['reason']}." for each in others)
    )


def _waterfall(cell: Figures) -> Picture:
    """The colocated ``ttft_decode``, what each stage adds to it, and the disaggregated one, which is both together."""
    loaded, from_ms, added = under_load(cell), cell["colocated_ms"], cell["added_ttft_ms"][Figure.TTFT_DECODE]
    total = Interval.from_dict(added)
    # What is unattributed and, of pairs, the distance of the middle half's mean from the median.
    causes = {
        **{name: ms for name, ms in cell["causes_ms"].items() if abs(ms) >= 0.005},
        "unexplained": cell["unexplained_ms"],
    }
    starts = list(itertools.accumulate(causes.values(), initial=from_ms))
    ends = {COLOCATED: from_ms, PD: from_ms + total.value}
    bars = [
        {"name": name, "from": start, "ms": ms, "text": f"{ms:+.2f}", "color": COLORS.get(name, COLORS[UNATTRIBUTED])}
        for (name, ms), start in zip(causes.items(), starts, strict=False)
    ]
    whole = [
        {"name": look["label"], "from": 0.0, "ms": ends[arm], "text": f"{ends[arm]:.2f}", "color": look["color"]}
        for arm, look in ARM_LOOKS.items()
    ]
    bars = [whole[1], *bars, whole[0]]
    edges = [*starts, *ends.values()]
    margin = max(0.5 * (max(edges) - min(edges)), 0.5)
    low = max(0.0, min(edges) - margin)
    panel = Panel(
        [Mark(bars, "ms", "name", kind="bars", to="from", text="text", look={"height": 0.68})],
        x=f"ms until token 2 is at the client{' (axis starts later than 0)' if low else ''}",
        rows=[str(bar["name"]) for bar in bars],
        xlim=(low, max(edges) + margin),
    )
    where = [f"{cell['prompt_len']} tokens", cell["transport"], f"{cell['rate']:g} requests/s" if loaded else ""]
    means = (
        f"Means over {cell['n']} requests of each arm"
        if loaded
        else f"Means over the middle half of {cell['n']} pairs, whose differences lie around the median; disaggregated "
        "is colocated and the median difference"
    )
    chance = "" if total.sign else " As no difference could be measured, its causes may be chance."
    return Picture(
        "causes_under_load" if loaded else "causes",
        f"From colocated to disaggregated, stage by stage ({', '.join(filter(None, (*where, beside_text(cell))))})",
        f"{means}. Each bar is the difference of one stage between the arms. Together they are the added ttft_decode "
        f"of {total.text()}, except for {cell['unexplained_ms']:+.2f} ms that no stage explains.{chance}",
        [panel],
    )


def _over_length(cells: Sequence[Figures]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the prompt length, one line per transport and overlap."""
    lengths, names = sorted({cell["prompt_len"] for cell in cells}), list(dict.fromkeys(c["series"] for c in cells))
    panels = [
        Panel(
            [
                *(_single_pairs(cell, figure, PALETTE[names.index(cell["series"]) % len(PALETTE)]) for cell in cells),
                Mark(cells, "prompt_len", f"added_ttft_ms.{figure}", by="series"),
                Rule("y"),
            ],
            x="prompt length, tokens",
            y="added, ms",
            title=f"added {figure}",
            log="x",
            ticks=lengths,
            xlim=(lengths[0] / 1.3, lengths[-1] * 1.3),
            legend="best" if figure is Figure.TTFT else "",
        )
        for figure in Figure
    ]
    return Picture(
        "added_over_length",
        "Added latency over prompt length",
        "Median of the paired differences, disaggregated minus colocated, with 95 % intervals. Faint points are the "
        "pairs, hollow ones those beside which other processes used the machine; triangles at the edge stand for pairs "
        "beyond it. Left: token 1, which does not wait for the hand-off. Right: token 2, which does.",
        panels,
        columns=2,
    )


_POINTS = {
    f"{marker} {hollow}": {"marker": marker, **({"markerfacecolor": "none"} if hollow else {})}
    for marker in "ov^"
    for hollow in (True, False)
}


def _single_pairs(cell: Figures, figure: Figure, color: str) -> Mark:
    """The single differences behind a median, a little to its right; hollow where the pair was disturbed. Those more
    than eight times as far from the median as the middle half are drawn at that distance, as triangles."""
    added = cell["added_ttft_ms"][figure]
    lower, upper = np.percentile(added["differences_ms"], (25, 75))
    reach_ms, disturbed = 8 * max(float(upper - lower), 0.5), added["disturbed"] or ()
    points = []
    for place, ms in enumerate(added["differences_ms"]):
        off_ms = ms - added["median"]
        marker = "o" if abs(off_ms) <= reach_ms else "^" if off_ms > 0 else "v"
        shown_ms = added["median"] + min(max(off_ms, -reach_ms), reach_ms)
        points.append({"x": cell["prompt_len"] * 1.06, "ms": shown_ms, "how": f"{marker} {place in disturbed}"})
    look = {"label": None, "color": color, "markersize": 3.2, "alpha": 0.45}
    return Mark(points, "x", "ms", by="how", looks=_POINTS, look=look, kind="points")


def _predicted(cells: Sequence[Figures]) -> Picture:
    """Exposed transfer time: what arithmetic gives, and what was measured."""
    limit = 1.1 * max(max(cell["predicted_ms"], cell["achieved_ms"]) for cell in cells)
    panel = Panel(
        [Mark(cells, "predicted_ms", "achieved_ms", by="series", kind="points"), Rule("diagonal")],
        x="predicted exposed time, ms",
        y="measured exposed time, ms",
        xlim=(0, limit),
        ylim=(0, limit),
        legend="best",
    )
    return Picture(
        "predicted",
        "Predicted against measured",
        "The prediction is the prompt's bytes over the link's measured ceiling, in the parts of the overlap mode, plus "
        "the fixed cost of a hand-off measured with one block. Points on the dashed line are explained by arithmetic; "
        "points above it waited for something else.",
        [panel],
    )


def _three_times(cells: Sequence[Figures]) -> Picture:
    """Exposed, wire and request-to-ready time of every cell: three figures that are easily confused."""
    kinds = {"achieved_ms": "exposed", "wire_ms": "on the wire", "request_to_ready_ms": "request to ready"}
    points = [
        {"row": f"{cell['prompt_len']} · {cell['series']}", "kind": kind, "ms": cell[key]}
        for key, kind in kinds.items()
        for cell in cells
    ]
    marks, rows = [Mark(points, "ms", "row", by="kind", kind="points")], list(dict.fromkeys(p["row"] for p in points))
    return Picture(
        "three_times",
        "Exposed, wire, and request-to-ready time",
        "Exposed is what the request waits for after its prompt is computed. The wire time is spent on moving bytes, "
        "most of it hidden behind the prefill. Request-to-ready spans from decode's allocation to the last block, and "
        "so contains the prefill.",
        [Panel(marks, x="ms (logarithmic)", log="x", rows=rows, legend="above")],
    )


def _over_width(cells: Sequence[Figures]) -> Picture:
    """Added ``ttft_decode`` over the bytes of KV that a request moves."""
    named = [{**cell, "name": cell["width"].upper()} for cell in cells]
    megabytes = [cell["megabytes"] for cell in cells]
    panel = Panel(
        [Mark(named, "megabytes", "added_ttft_ms.ttft_decode", by="width", kind="points", text="name", note=(7, 5))],
        x="KV per request, MB",
        y="added ttft_decode, ms",
        log="x",
        xlim=(0.6 * min(megabytes), 1.8 * max(megabytes)),
    )
    return Picture(
        "over_width",
        f"KV width ({cells[0]['prompt_len']} tokens, {cells[0]['transport']})",
        "The same model with as many KV heads as heads (MHA), a third (GQA), the size of a latent cache (MLA), and one "
        "(MQA).",
        [panel],
    )


def _first_tokens(usual: Figures, late: Figures) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` with both settings of ``router.first_token``."""
    tokens = {"ttft": "token 1 (ttft)", "ttft_decode": "token 2 (ttft_decode)"}
    points = [
        {"setting": f"router.first_token: {name}", "token": token, "added": cell["added_ttft_ms"][key]}
        for name, cell in (("prefill", usual), ("decode", late))
        for key, token in tokens.items()
    ]
    mark = Mark(points, "token", "added", by="setting", kind="points", look={"markersize": 7})
    return Picture(
        "first_tokens",
        f"Who sends token 1 ({usual['prompt_len']} tokens, {usual['transport']})",
        "With prefill, the client gets token 1 as soon as it is sampled. With decode, it gets token 1 once the KV has "
        "arrived, as in services that discard prefill's token: then token 1 pays for the hand-off.",
        [Panel([mark, Rule("y")], y="added, ms", columns=list(tokens.values()), legend="above")],
    )


def _attainment(cells: Sequence[Figures]) -> Picture:
    """The share of requests that met the SLO over the rate, both arms: a column per prompt length, a row per place."""
    lengths, places = {cell["prompt_len"] for cell in cells}, set(map(place_of, cells))
    panels: list[Panel] = []
    for place, length in dict.fromkeys((place_of(cell), cell["prompt_len"]) for cell in cells):
        points = [
            {"rate": cell["rate"], "arm": arm, "met": cell["attainment"][arm]}
            for cell in cells
            for arm in ARMS
            if (place_of(cell), cell["prompt_len"]) == (place, length)
        ]
        panel = attainment_panel(points, "offered load, requests/s")
        title = f"{length} tokens" + (f" · {' · '.join(place)}" if len(places) > 1 else "")
        panels.append(replace(panel, title=title, legend="" if panels else "best"))
    return Picture(
        "attainment",
        "How many requests meet the SLO under load",
        "Share of all requests, with 95 % intervals; failed requests miss the SLO. The dashed line is the 90 % above "
        "which an arm sustains the load.",
        panels,
        columns=len(lengths),
        share={"sharey": True},
    )
