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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from experiments.experiment import Cell, Options, option
from experiments.matrix import (
    IDLE,
    PAIR_TOKENS,
    ModeMatrix,
    attainment_panel,
    cell_caveats,
    check_loads,
    idle_table,
    load_table,
    pair_points,
    sustains,
    unclear_text,
    under_load,
)
from experiments.modes import ARMS, ATTAINMENT, PD, PairOptions, added_text, slo_text
from experiments.report.drawing import ARM_LOOKS, INK, PALETTE, Mark, Panel, Picture, Rule, TableBlock
from experiments.report.page import Report, setup_of
from experiments.run_folder import Figures, Parameters, RunData
from experiments.workloads.conversation import Room, Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.machine_load import beside_text
from ops.waterfall.bars import COLORS
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import CONFIDENCE, Interval, apart, interval_text
from pdserve.core.request import counted
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
_PLACE = ("workers", "transport", "overlap")
"""The parameters of a cell beside its prompts and load, as far as it has them."""


class AddedTtftOptions(PairOptions):
    """Options of `AddedTtft`."""

    of_service = frozenset({"model", "transports", "overlaps", "widths", "first_tokens"})

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
    title = "What disaggregation adds to TTFT"
    question = "How much does disaggregation add to the time to first token, and where does it go?"
    options_type: ClassVar[type[Options]] = AddedTtftOptions
    fixed_options: ClassVar[Parameters] = {"width_prompt_len": _HEADLINE_LEN}

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
        places = list(itertools.product(options.transports, options.overlaps))
        if attached is not None:
            most, places = Room.of(attached).tokens, [("+".join(sorted(linked_transports(attached))), "as-configured")]
            lengths = options.fitting(lengths, most - PAIR_TOKENS, "--prompt-lens")
        loaded = options.load_prompt_lens or sorted({_nearest(lengths), max(lengths)})
        loaded = [length for length in loaded if length + options.load_output_len <= most]
        if options.rates and options.slo == "auto" and (missing := [each for each in loaded if each not in lengths]):
            raise InvalidRequest(
                f"--load-prompt-lens: the automatic SLO needs idle requests of {missing[0]} tokens; add the length to "
                "--prompt-lens, give --slo, or measure no load with --rates ''"
            )
        cells: list[Cell] = []

        def add(
            length: int, place: Sequence[str], prefix: str = "", settings: Parameters | None = None, **own: Any
        ) -> None:
            transport, overlap = place
            parameters = {"prompt_len": length, "transport": transport, "overlap": overlap, "load": IDLE, **own}
            service = {"transfer.transport": transport, "transfer.overlap": overlap, **(settings or {})}
            name = f"{prefix}{length}/{transport}/{overlap}{'' if prefix else '/' + parameters['load']}"
            pairs = None if under_load(parameters) else options.pairs
            cells.append(self.cell(name, parameters, {} if attached else service, pairs))

        for place in places:
            for length in lengths:
                add(length, place)
            which = {"transports": place[1] == places[0][1], "first": place == places[0], "all": True}
            for length, rate in itertools.product(loaded, options.rates if which[options.load_combinations] else ()):
                add(length, place, load=f"rate-{rate:g}", rate=rate)
        if attached is None and "decode" in options.first_tokens:
            late = {"router.first_token": "decode"}
            add(_nearest(lengths), places[0], "first-token-decode/", late, first_token="decode")
        for width in options.widths if attached is None else ():
            shape = {"model.path": f"dummy:{_SHAPES / width / 'config.json'}"}
            add(_HEADLINE_LEN, places[0], f"width-{width}/", shape, width=width)
        return cells

    def workload(self, parameters: Parameters) -> Workload:
        """Random prompts of one length."""
        output_len = self.options.load_output_len if under_load(parameters) else PAIR_TOKENS
        return Synthetic(Fixed(parameters["prompt_len"]), Fixed(output_len))

    def found(self, cells: Sequence[Figures], run: RunData) -> Figures:
        """The keys of `break_even_of`."""
        return break_even_of([cell for cell in cells if under_load(cell)])

    def report(self, run: RunData, summary: Figures) -> Report:
        """The waterfall of causes, the curves over length, attainment under load, and tables."""
        cells = [{**cell, "series": " · ".join(place_of(cell))} for cell in summary["cells"]]
        idle, loaded = ([cell for cell in cells if under_load(cell) == which] for which in (False, True))
        load = f"Poisson arrivals, {self.options.duration_s:g} s per mode and round, {self.options.rounds} rounds"
        caveats = [
            "An idle service has no queues: what disaggregation saves or costs under load is not in the idle cells.",
            loaded != []
            and "Predictions are of an idle link and an idle decode worker, under load as well. What is exposed beyond "
            "them there waited for other hand-offs, for room in decode's pool, or for a core.",
            any((cell["causes_ms"] or {}).get("decode_leg") for cell in idle)
            and "Colocated requests went to the same servers: what their KV connector costs when it moves nothing is "
            "in both modes, and not in the difference (docs/vllm.md).",
            any(cell["predicted_ms"] is None for cell in idle)
            and "No prediction where the link was not measured or the model's layers are unknown on this host.",
            *cell_caveats(cells),
        ]
        blocks: list[Picture | TableBlock] = []
        if plain := [cell for cell in idle if not {"width", "first_token"} & cell.keys()]:
            blocks += [_waterfall(_headline(plain)), _over_length(plain)]
        if explained := [cell for cell in loaded if cell["causes_ms"] is not None]:
            point, headline = summary["break_even"] or {}, _headline(explained)
            alike = [c for c in explained if all(c[key] == headline[key] for key in ("prompt_len", "series"))]
            highest = max(alike, key=lambda cell: float(cell["rate"]))
            blocks.append(_waterfall(next((cell for cell in explained if cell["cell"] == point.get("cell")), highest)))
        if any(cell["slo_ms"] for cell in loaded):
            blocks.append(_attainment(loaded))
        blocks += [make(each) for make, each in ((idle_table, idle), (load_table, loaded)) if each]
        answer = " ".join(filter(None, (_answer(plain or idle, run), _answer_under_load(summary, loaded))))
        setup = setup_of(run, _METHOD, load=load if loaded else "")
        return Report(self.title, self.question, answer, setup, blocks, caveats, summary["failed"])


def linked_transports(status: ServiceStatus) -> set[str]:
    """The transports of a running service. InvalidRequest if it has no links."""
    transports = {link.transport for worker in status.workers for link in worker.links}
    if not transports:
        raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
    return transports


def break_even_of(loaded: Sequence[Figures]) -> Figures:
    """``break_even``: of all places (transport and overlap) the one at the shortest prompts, and there at the lowest
    rate: ``cell``, ``prompt_len``, ``rate``, place, ``slo_ms``, ``attainment`` by arm, ``distinct`` (whether the
    intervals of both shares are apart), ``only_pd`` and ``neither`` (the cells from there on that only ``pd`` sustains,
    and that neither does). ``break_even_reason``: null, or why there is none. ``break_evens``: an entry per place."""
    places: dict[tuple[str, ...], list[Figures]] = {}
    for cell in loaded:
        if cell["slo_ms"]:
            places.setdefault(place_of(cell), []).append(cell)
    found = [{**_place(cells[0]), **_break_even(cells)} for cells in places.values()]
    points = [each["break_even"] for each in found if each["break_even"] is not None]
    reasons = {each["reason"] for each in found}
    if not found:
        reasons = {
            "there is no SLO: the idle cells were not measured" if loaded else "no load was measured: give --rates"
        }
    why = [f"{', '.join(place_of(each))}: {each['reason']}" for each in found] if len(reasons) > 1 else reasons
    return {
        "break_even": min(points, key=_size, default=None),
        "break_even_reason": None if points else "; ".join(why),
        "break_evens": found,
    }


def _break_even(judged: Sequence[Figures]) -> Figures:
    """From which prompt length and rate on only pd sustains the load, at one place (``break_even``), or the ``reason``
    why there is none.

    The point is a cell that pd sustains and colocated does not. Of the cells with prompts and rates at least as large,
    colocated sustains none: pd alone sustains them, or, further up, neither does. Of several such points it is the one
    with the shortest prompts, and there the lowest rate."""

    def onwards(cell: Figures, among: Sequence[Figures]) -> list[Figures]:
        return [each for each in among if all(a >= b for a, b in zip(_size(each), _size(cell), strict=True))]

    pd, colocated = ([cell for cell in judged if sustains(cell, arm)] for arm in ARMS)
    won = sorted((cell for cell in pd if cell not in colocated), key=_size)
    for cell in won:
        if not onwards(cell, colocated):
            shares, further = cell["attainment"], onwards(cell, judged)
            point = {
                **{key: cell[key] for key in ("cell", "prompt_len", "rate", "slo_ms", "n")},
                **_place(cell),
                "attainment": {arm: shares[arm]["mean"] for arm in ARMS},
                "distinct": apart(shares[PD], shares[ARMS[1]]) > 0,
                "only_pd": [each["cell"] for each in further if each in won],
                "neither": [each["cell"] for each in further if each not in won],
            }
            return {"break_even": point, "reason": None}
    share = f"(at least {100 * ATTAINMENT:.0f} % of the requests within the SLO)"
    reason = f"colocated sustained every load that pd sustained {share}"
    if won:
        reason = (
            f"only pd sustained {won[0]['cell']}, but with prompts and rate at least as large colocated sustained "
            f"{onwards(won[0], colocated)[0]['cell']} too"
        )
    elif len(colocated) == len(judged):
        reason = f"colocated sustained every one of the {len(judged)} measured loads {share}"
    elif not pd:
        reason = f"pd sustained none of the {len(judged)} measured loads {share}"
    return {"break_even": None, "reason": reason}


def _size(cell: Figures) -> tuple[int, float]:
    return cell["prompt_len"], cell["rate"]


def _place(cell: Figures) -> dict[str, str]:
    return {key: cell[key] for key in _PLACE if key in cell}


def place_of(cell: Figures) -> tuple[str, ...]:
    """The parameters of a cell beside its prompts and load."""
    return tuple(_place(cell).values())


def _nearest(lengths: Sequence[int]) -> int:
    return min(lengths, key=lambda each: abs(each - _HEADLINE_LEN))


def _headline(cells: Sequence[Figures]) -> Figures:
    """The cell that the answer is about: the first transport and overlap, at 512 tokens or the nearest length."""
    first = [cell for cell in cells if place_of(cell) == place_of(cells[0])]
    return min(first, key=lambda cell: abs(cell["prompt_len"] - _HEADLINE_LEN))


def _answer(cells: Sequence[Figures], run: RunData) -> str:
    if not cells:
        return "No pair of requests was completed."
    cell = _headline(cells)
    token_1, token_2 = (added_text(f"token {n}", cell["added_ttft_ms"][each]) for n, each in enumerate(Figure, 1))
    beside = f" ({text})" if (text := beside_text(cell)) else ""
    sentences = [
        f"With prompts of {cell['prompt_len']} tokens over {cell['transport']}, one request at a time{beside}, "
        f"{token_1}, and {token_2}, the first that waits for the hand-off.",
        f"{interval_text(cell['exposed_ms'])} ms of KV transfer are exposed." if cell["exposed_ms"] else "",
        unclear_text(cell, run),
    ]
    if _told(cell):
        known = [cause for cause in cell["causes_ms"].items() if abs(cause[1]) > cell["clock_error_ms"]]
        total = Interval.from_dict(cell["added_ttft_ms"][Figure.TTFT_DECODE])
        largest_ms = sorted(known, key=lambda cause: -abs(cause[1]))[:2]
        named = " and ".join(f"{name} ({_signed(total, ms)} ms)" for name, ms in largest_ms)
        largest = f"The largest causes are {named}" if named else "No cause exceeds the clock error"
        explained = f"the stages explain {cell['explained_pct']:.0f} % of what token 2 waits longer"
        sentences.append(f"{largest}; together {explained}.")
    for other in cells:
        if other is not cell and place_of(other) == place_of(cell) and _told(other):
            added = added_text("token 2", other["added_ttft_ms"][Figure.TTFT_DECODE])
            sentences.append(f"With prompts of {other['prompt_len']} tokens, {added}.")
    return " ".join(filter(None, sentences))


def _told(cell: Figures) -> int:
    """The sign of the added ``ttft_decode`` of a cell; 0 if it has none."""
    return Interval.from_dict(cell["added_ttft_ms"][Figure.TTFT_DECODE]).sign


def _answer_under_load(summary: Figures, loaded: Sequence[Figures]) -> str:
    found = summary["break_even"]
    if found is None:
        return f"Under load no break-even was found: {summary['break_even_reason']}." if loaded else ""
    shares, only_pd, neither = found["attainment"], len(found["only_pd"]), len(found["neither"])
    pays, chance = "it pays", ""
    if not found["distinct"]:
        pays = "it was not shown to pay; in the measurement it does"
        chance = " Their intervals overlap or are missing, so this may be chance."
    return (
        f"Under load ({', '.join(place_of(found))}) {pays} from prompts of {found['prompt_len']} tokens at "
        f"{found['rate']:g} requests/s on: there {shares[PD]:.0%} of {counted(found['n'], 'disaggregated request')} "
        f"meet the SLO ({slo_text(found['slo_ms'])}), and {shares['colocated']:.0%} of the colocated ones. Of the "
        f"{only_pd + neither} measured loads from there on, only disaggregated requests meet it in {only_pd}, and "
        f"neither in {neither}."
        + chance
        + "".join(
            f" With {', '.join(place_of(each))}: {each['reason']}."
            for each in summary["break_evens"]
            if each["break_even"] is None
        )
    )


def _signed(interval: Interval, ms: float) -> str:
    return f"{'+' * (ms >= 0)}{interval.written(ms)}"


def _waterfall(cell: Figures) -> Picture:
    """The colocated ``ttft_decode``, what each stage adds to it, and the disaggregated one, which is both together."""
    loaded, from_ms = under_load(cell), cell["colocated_ms"]
    total = Interval.from_dict(cell["added_ttft_ms"][Figure.TTFT_DECODE])
    # Unexplained: what is unattributed and, of pairs, the distance of the middle half's mean from the median.
    edges_ms = cell.get("cause_intervals_ms") or {}  # runs of earlier versions have none
    causes = {name: ms for name, ms in cell["causes_ms"].items() if abs(ms) >= 0.005}
    causes["unexplained"] = cell["unexplained_ms"]
    starts = [*itertools.accumulate(causes.values(), initial=from_ms)]
    pd, colocated = ({**look, "name": look["label"]} for look in ARM_LOOKS.values())
    bars = [
        {**colocated, "from": 0.0, "ms": {"mean": from_ms}, "text": total.written(from_ms)},
        *(
            {
                "name": name,
                "from": start,
                "ms": {"lo": None, "hi": None, **edges_ms.get(name, {}), "mean": ms},
                "text": _signed(total, ms),
                "color": COLORS.get(name, COLORS[UNATTRIBUTED]),
            }
            for (name, ms), start in zip(causes.items(), starts, strict=False)
        ),
        {
            "name": "added",
            "from": from_ms,
            "ms": {"mean": total.value, "lo": total.lo, "hi": total.hi},
            "text": _signed(total, total.value),
            "color": INK,
        },
        {**pd, "from": 0.0, "ms": {"mean": from_ms + total.value}, "text": total.written(from_ms + total.value)},
    ]
    edges = [*starts, *(from_ms + ms for ms in (total.value, total.lo, total.hi) if ms == ms)]  # nan: no interval
    edges += [
        start + ms
        for name, start in zip(causes, starts, strict=False)
        for ms in ((edges_ms.get(name) or {}).get(edge) for edge in ("lo", "hi"))
        if ms is not None
    ]
    margin = max(0.5 * (max(edges) - min(edges)), 0.5)
    low, looks = max(0.0, min(edges) - margin), {bar["name"]: {"color": bar["color"]} for bar in bars}
    panel = Panel(
        [Mark(bars, "ms", "name", "name", looks, {"height": 0.68}, "bars", "from", "text")],
        f"ms until token 2 is at the client{' (axis starts later than 0)' if low else ''}",
        rows=[*looks],
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
        f"{means}. Each bar is the difference of one stage between the arms, with its 95 % interval. Together they "
        f"are the added ttft_decode of {total.text()}, except for {_signed(total, cell['unexplained_ms'])} ms that no "
        f"stage explains.{chance}",
        [panel],
    )


def _over_length(cells: Sequence[Figures]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the prompt length, one line per transport and overlap. Behind each median
    are its pairs (`pair_points`), a little to the right."""
    lengths, colors = (
        sorted({cell["prompt_len"] for cell in cells}),
        dict(zip(dict.fromkeys(cell["series"] for cell in cells), itertools.cycle(PALETTE), strict=False)),
    )
    panels: list[Panel] = []
    for figure in Figure:
        marks: list[Mark | Rule] = [Mark(cells, "prompt_len", f"added_ttft_ms.{figure}", "series"), Rule("y")]
        for cell in cells:
            added = cell["added_ttft_ms"][figure]
            xs = [1.06 * cell["prompt_len"]] * len(added["differences_ms"])
            marks.append(pair_points(added, xs, colors[cell["series"]]))
        title, legend = f"added {figure}", "" if panels else "best"
        xlim = lengths[0] / 1.3, lengths[-1] * 1.3
        panels.append(Panel(marks, "prompt length, tokens", "added, ms", title, "x", lengths, xlim=xlim, legend=legend))
    return Picture(
        "added_over_length",
        "Added latency over prompt length",
        "Median of the paired differences, disaggregated minus colocated, with 95 % intervals. Faint points are the "
        "pairs, hollow ones those beside which other processes used the machine; pairs far beyond the others are drawn "
        "at the edge. Left: token 1, which does not wait for the hand-off. Right: token 2, which does.",
        panels,
        columns=2,
    )


def _attainment(cells: Sequence[Figures]) -> Picture:
    """The share of requests that met the SLO over the rate, both arms: a column per prompt length, a row per place."""
    panels: list[Panel] = []
    for series, length in dict.fromkeys((cell["series"], cell["prompt_len"]) for cell in cells):
        points = [
            {"rate": cell["rate"], "arm": arm, "met": cell["attainment"][arm]}
            for cell in cells
            for arm in ARMS
            if (cell["series"], cell["prompt_len"]) == (series, length)
        ]
        panels.append(attainment_panel(points, f"{length} tokens · {series}", "" if panels else "best"))
    return Picture(
        "attainment",
        "How many requests meet the SLO under load",
        "Share of all requests, with 95 % intervals; failed requests miss the SLO. The dashed line is the 90 % above "
        "which an arm sustains the load.",
        panels,
        columns=len({cell["prompt_len"] for cell in cells}),
        share={"sharey": True},
    )
