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
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from experiments.environment import LOAD, beside_text
from experiments.experiment import Cell, option
from experiments.modes import (
    ATTAINMENT,
    COLOCATED,
    PD,
    QUEUES,
    LinkModel,
    LoadPlan,
    ModeMatrix,
    PairOptions,
    added_ms,
    added_text,
    attainment_panel,
    causes_of,
    check_rates,
    check_slo,
    load_caveats,
    middle_pairs,
    pair_figures,
    pairs_of,
    slo_text,
    summarise_load,
    sustains,
    unclear_text,
)
from experiments.report.drawing import ARM_LOOKS, PALETTE, Mark, Panel, Picture, Rule, TableBlock, table
from experiments.report.page import Report, setup_of
from experiments.run_folder import FinishedCell, RequestRow, RunData
from experiments.workloads.conversation import Room, Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from ops.waterfall.bars import COLORS
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import InvalidRequest
from pdserve.core.interval import CONFIDENCE, MIN_VALUES, Interval, apart
from pdserve.core.timeline import UNATTRIBUTED, Figure

WIDTHS = ("mha", "gqa", "mla", "mqa")
"""Shapes of one model with KV caches of different widths: a Llama of 12 heads of 48 dimensions and 30 layers, with 12,
4, 2 and 1 KV heads. All have random weights, so that nothing but the shape matters. ``mla`` has the cache size of
multi-head latent attention, not its computation: DeepSeek-V2 caches 4.5 times the head dimension per token and layer
(216 values here); two KV heads cache 192."""
_SHAPES = Path(__file__).parent / "shapes"
_HEADLINE_LEN = 512
"""The answer is about this prompt length, or the nearest one that was measured."""
_METHOD = (
    "the same prompts in both modes, one request at a time, A B B A; the added time is the median of the differences, "
    f"with a {100 * CONFIDENCE:.0f} % interval from their order; pairs are added until it is narrow or the time is over"
)


class AddedTtftOptions(PairOptions):
    """Options of `AddedTtft`."""

    prompt_lens: tuple[PositiveInt, ...] = option(
        (128, 512, 1024, 2048), description="prompt lengths in tokens", quick=[128, 512]
    )
    transports: tuple[str, ...] = Field(("shm", "tcp"), description="transports to compare")
    overlaps: tuple[Literal["none", "chunk", "layer"], ...] = option(
        ("layer", "chunk", "none"),
        description="overlap modes to compare (see transfer.overlap)",
        quick=["layer"],
    )
    pairs: int = Field(12, ge=1, description="least pairs of requests per idle cell")
    widths: tuple[str, ...] = option(
        ("mha", "gqa", "mla", "mqa"),
        description="KV widths of one model to compare (mha, gqa, mla, mqa; '' for none)",
        quick=[],
    )
    width_prompt_len: int = Field(512, ge=1, description="prompt length of the comparison of KV widths")
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

    name: ClassVar[str] = "added-ttft"
    question: ClassVar[str] = "How much does disaggregation add to the time to first token, and where does it go?"
    options_type: ClassVar[type[AddedTtftOptions]] = AddedTtftOptions
    options: AddedTtftOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """Idle cells of every prompt length, transport and overlap; cells under load with those that
        ``load_combinations`` names; the other settings of ``router.first_token`` with the first transport and overlap;
        one cell per KV width. For a running service: the idle cells and those under load, with the transport and the
        model that it has."""
        options = self.options
        check_rates(options.rates)
        check_slo(options.slo)
        if attached is not None:
            transports = {link.transport for worker in attached.workers for link in worker.links}
            if not transports:
                raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
            fit = [length for length in options.prompt_lens if length + self.output_len <= Room.of(attached).tokens]
            if not fit:
                raise InvalidRequest(f"--prompt-lens: none fits the {Room.of(attached).tokens} tokens of the service")
            loaded = [
                length
                for length in self._load_lengths(fit)
                if length + options.load_output_len <= Room.of(attached).tokens
            ]
            place = {"transport": "+".join(sorted(transports)), "overlap": "as-configured"}
            return [*(self._idle(length, place, {}) for length in fit), *self._under_load(loaded, fit, place, {})]
        unknown = [width for width in options.widths if width not in WIDTHS]
        if unknown:
            raise InvalidRequest(f"--widths: {unknown[0]!r} is none of {', '.join(WIDTHS)}")
        for name in ("prompt_lens", "transports", "overlaps"):
            if not getattr(options, name):
                raise InvalidRequest(f"--{name.replace('_', '-')}: is empty")
        cells: list[Cell] = []
        for transport in options.transports:
            for overlap in options.overlaps:
                place = {"transport": transport, "overlap": overlap}
                service = {"transfer.transport": transport, "transfer.overlap": overlap}
                cells += [self._idle(length, place, service) for length in options.prompt_lens]
                first = (transport == options.transports[0], overlap == options.overlaps[0])
                if {"first": all(first), "transports": first[1], "all": True}[options.load_combinations]:
                    cells += self._under_load(
                        self._load_lengths(options.prompt_lens), options.prompt_lens, place, service
                    )
        place = {"transport": options.transports[0], "overlap": options.overlaps[0]}
        service = {"transfer.transport": options.transports[0], "transfer.overlap": options.overlaps[0]}
        if "decode" in options.first_tokens:
            length = _nearest(options.prompt_lens)
            late = {"router.first_token": "decode"}
            cells.append(self._idle(length, place, {**service, **late}, "first-token-decode", first_token="decode"))
        cells += [
            self._idle(
                options.width_prompt_len,
                place,
                {"model.path": f"dummy:{_SHAPES / width / 'config.json'}", **service},
                f"width-{width}",
                width=width,
            )
            for width in options.widths
        ]
        return cells

    def _idle(
        self, length: int, place: Mapping[str, Any], service: Mapping[str, Any], prefix: str = "", **more: Any
    ) -> Cell:
        name = f"{length}/{place['transport']}/{place['overlap']}"
        return Cell(
            f"{prefix}/{name}" if prefix else f"{name}/idle",
            {"prompt_len": length, **place, "load": "idle", **more},
            service,
            self.options.pairs,
            self.options.pairs_s,
        )

    def _under_load(
        self, lengths: Sequence[int], idle: Sequence[int], place: Mapping[str, Any], service: Mapping[str, Any]
    ) -> list[Cell]:
        options = self.options
        missing = [length for length in lengths if length not in idle]
        if options.rates and options.slo == "auto" and missing:
            raise InvalidRequest(
                f"--load-prompt-lens: the automatic SLO needs idle requests of {missing[0]} tokens; add the length to "
                "--prompt-lens, give --slo, or measure no load with --rates ''"
            )
        return [
            Cell(
                f"{length}/{place['transport']}/{place['overlap']}/rate-{rate:g}",
                {"prompt_len": length, **place, "load": f"rate-{rate:g}", "rate": rate},
                service,
                self.load(rate).planned(),
                self.load(rate).sending_s,
                may_overload=True,
            )
            for length in lengths
            for rate in options.rates
        ]

    def _load_lengths(self, idle: Sequence[int]) -> Sequence[int]:
        return self.options.load_prompt_lens or sorted({_nearest(idle), max(idle)})

    def load(self, rate: float) -> LoadPlan:
        """As the options say."""
        return LoadPlan(rate, self.options.duration_s, self.options.rounds, self.options.seed)

    def workload(self, prompt_len: int) -> Workload:
        """Random prompts of one length."""
        return Synthetic(Fixed(prompt_len), Fixed(self.options.load_output_len))

    def least_pairs(self) -> int:
        """As the options say."""
        return self.options.pairs

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``cells`` has an object per cell.

        All of them: ``cell``, ``prompt_len``, ``transport``, ``overlap``, ``load`` (``idle``, or such as ``rate-2``),
        ``n``, ``errors``; ``added_ttft_ms``: ``ttft`` and ``ttft_decode``, disaggregated minus colocated; ``arms_ms``
        by arm; ``causes_ms`` by stage, ``unexplained_ms`` and ``explained_pct`` of ``ttft_decode``; ``predicted_ms``
        and ``achieved_ms``, the exposed transfer time by arithmetic and as measured, with ``wire_ms``,
        ``request_to_ready_ms``, ``prefill_ms``, ``ceiling_gbs``, ``fixed_ms``, ``clock_error_ms``;
        ``transports_used``, ``kv_bytes``, ``kv_bytes_expected``, ``kv_bytes_equal``, ``tokens_equal``.

        Idle cells: ``width`` and ``first_token`` in these comparisons; the added time is the median of the pairs
        (``median``, ``lo``, ``hi``, ``n``, ``mean``, ``differences_ms``, and the places of those that are
        ``disturbed``, null if unknown); ``machine_load`` has the ``cores`` of this host and those that others used;
        ``middle_colocated_ms`` is the mean colocated ``ttft_decode`` of the middle half of the pairs.

        Cells under load: ``rate`` and the keys of `summarise_load`; the added time is the difference of the arms'
        means.

        ``break_even`` has ``cell``, ``prompt_len``, ``rate``, ``transport``, ``overlap``, ``slo_ms``, ``attainment``
        by arm, ``distinct`` (whether the intervals of both shares are apart), ``only_pd`` and ``neither`` (the cells
        from there on that only ``pd`` sustains, and that neither does); null if there is none, with
        ``break_even_reason``. ``break_evens`` has one for each transport and overlap mode."""
        idle = [
            summary
            for cell in run.cells
            if "rate" not in cell.parameters and (summary := _summarise_cell(cell, run)) is not None
        ]
        loaded = [
            {
                "cell": cell.cell,
                **cell.parameters,
                **summarise_load(cell, rows, self.slo(self.options.slo, cell, run), self.options.seed),
                **_handoffs(cell, [row for row in rows if row.arm == PD and row.error is None]),
            }
            for cell in run.cells
            if "rate" in cell.parameters and (rows := run.rows_of(cell.cell))
        ]
        return {"experiment": self.name, "cells": [*idle, *loaded], **break_even_of(loaded), "failed": self.failed(run)}

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The waterfall of causes, the curves over length, prediction against measurement, attainment under load,
        KV widths, and tables."""
        cells: list[Mapping[str, Any]] = [cell for cell in summary["cells"] if cell["load"] == "idle"]
        loaded: list[Mapping[str, Any]] = [cell for cell in summary["cells"] if cell["load"] != "idle"]
        setup = setup_of(run, _METHOD)
        if loaded:
            setup.append(
                ("load", f"Poisson arrivals, {self.options.duration_s:g} s per mode and round, each mode alone")
            )
            limits = {(cell["prompt_len"], *_place(cell)): cell["slo_ms"] for cell in loaded if cell["slo_ms"]}
            for (length, *place), limits_ms in limits.items():
                setup.append((f"SLO, {length} tokens, {', '.join(place)}", slo_text(limits_ms)))
        report = Report(
            title="What disaggregation adds to TTFT",
            question=self.question,
            answer=" ".join(filter(None, (_answer(cells, run), _answer_under_load(summary, loaded)))),
            setup=setup,
            caveats=[*_caveats(cells, bool(loaded)), *load_caveats(loaded)],
            failures=summary["failed"],
        )
        idle = _series([cell for cell in cells if _plain(cell)])
        if idle:
            report.blocks += [_waterfall_picture(_headline(idle)), _length_picture(idle)]
            if any(cell["predicted_ms"] is not None for cell in idle):
                report.blocks.append(_prediction_picture(idle))
            report.blocks.append(_times_picture(idle))
        late = [cell for cell in cells if cell.get("first_token") == "decode"]
        if idle and late:
            report.blocks.append(_first_token_picture(_headline(idle), late[0]))
        explained = [cell for cell in loaded if cell["causes_ms"] is not None]
        if explained:
            report.blocks.append(_waterfall_picture(_headline_under_load(summary, explained)))
        if any(cell["slo_ms"] for cell in loaded):
            report.blocks.append(_attainment_picture(loaded))
        widths = _series([cell for cell in cells if cell.get("width")])
        if len(widths) > 1:
            report.blocks.append(_width_picture(widths))
        if cells:
            report.blocks.append(_table(cells))
        if loaded:
            report.blocks += [_load_table(loaded), _load_causes_table(loaded)]
        return report


def _nearest(lengths: Sequence[int]) -> int:
    return min(lengths, key=lambda each: abs(each - _HEADLINE_LEN))


def _plain(cell: Mapping[str, Any]) -> bool:
    """Whether an idle cell belongs to the comparison of lengths, transports and overlaps."""
    return "width" not in cell and "first_token" not in cell


def _place(cell: Mapping[str, Any]) -> tuple[str, str]:
    return cell["transport"], cell["overlap"]


def break_even_of(loaded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``break_even``: of all places (transport and overlap) the one at the shortest prompts, and there at the lowest
    rate. ``break_even_reason``: None, or why there is none. ``break_evens``: one entry per place with both."""
    judged = [cell for cell in loaded if cell["slo_ms"]]
    if not judged:
        reason = "there is no SLO: the idle cells were not measured" if loaded else "no load was measured: give --rates"
        return {"break_even": None, "break_even_reason": reason, "break_evens": []}
    found: list[dict[str, Any]] = []
    for transport, overlap in dict.fromkeys(map(_place, judged)):
        at_place = [cell for cell in judged if _place(cell) == (transport, overlap)]
        point, why = _break_even(at_place)
        found.append({"transport": transport, "overlap": overlap, "break_even": point, "reason": why})
    points = [each["break_even"] for each in found if each["break_even"] is not None]
    reasons = [str(each["reason"]) for each in found]
    named = [f"{each['transport']}, {each['overlap']}: {each['reason']}" for each in found]
    return {
        "break_even": min(points, key=lambda point: (point["prompt_len"], point["rate"])) if points else None,
        "break_even_reason": None if points else reasons[0] if len(set(reasons)) == 1 else "; ".join(named),
        "break_evens": found,
    }


def _break_even(judged: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
    """From which prompt length and rate on only pd sustains the load, at one place; or None and why there is none.

    The point is a cell that pd sustains and colocated does not. Of the cells with prompts and rates at least as large,
    colocated sustains none: pd alone sustains them, or, further up, neither does. Of several such points it is the one
    with the shortest prompts, and there the lowest rate."""
    won = {cell["cell"]: sustains(cell, PD) and not sustains(cell, COLOCATED) for cell in judged}
    contradiction = None
    for cell in sorted(judged, key=lambda cell: (cell["prompt_len"], cell["rate"])):
        if not won[cell["cell"]]:
            continue
        onwards = [each for each in judged if each["prompt_len"] >= cell["prompt_len"] and each["rate"] >= cell["rate"]]
        against = [each["cell"] for each in onwards if sustains(each, COLOCATED)]
        if against:
            contradiction = contradiction or (cell["cell"], against[0])
            continue
        shares = cell["attainment"]
        return {
            **{key: cell[key] for key in ("cell", "prompt_len", "rate", "transport", "overlap", "slo_ms")},
            "attainment": {arm: shares[arm]["mean"] for arm in (PD, COLOCATED)},
            "distinct": apart(shares[PD], shares[COLOCATED]) > 0,
            "only_pd": [each["cell"] for each in onwards if won[each["cell"]]],
            "neither": [each["cell"] for each in onwards if not won[each["cell"]]],
        }, None
    share = f"{100 * ATTAINMENT:.0f} %"
    if contradiction is not None:
        return None, (
            f"in {contradiction[0]} only pd met the SLO for {share} of the requests, but not from there on: in "
            f"{contradiction[1]}, with prompts and rate at least as large, colocated met it too"
        )
    if all(sustains(cell, COLOCATED) for cell in judged):
        return None, f"colocated met the SLO for {share} of the requests at every load that was measured"
    if not any(sustains(cell, PD) for cell in judged):
        return None, f"pd met the SLO for {share} of the requests at no load that was measured"
    return None, f"wherever pd met the SLO for {share} of the requests, colocated did as well"


def _summarise_cell(cell: FinishedCell, run: RunData) -> dict[str, Any] | None:
    rows = run.rows_of(cell.cell)
    pairs, errors = pairs_of(rows)
    if not pairs:
        return None
    added = {figure: added_ms(pairs, figure) for figure in Figure}
    total = added[Figure.TTFT_DECODE]
    assert total is not None
    pd_rows, colocated_rows = [pd for pd, _ in pairs], [colocated for _, colocated in pairs]
    middle = middle_pairs(pairs, Figure.TTFT_DECODE)
    middle_pd, middle_colocated = [pd for pd, _ in middle], [colocated for _, colocated in middle]
    return {
        "cell": cell.cell,
        **cell.parameters,
        **pair_figures(rows, pairs, errors),
        LOAD: cell.facts.get(LOAD),
        "added_ttft_ms": {figure.value: each for figure, each in added.items() if each is not None},
        "arms_ms": {
            arm: {
                figure.value: round(
                    statistics.fmean(ms for row in of_arm if (ms := row.figure_ms(figure)) is not None), 4
                )
                for figure in Figure
            }
            for arm, of_arm in ((PD, pd_rows), (COLOCATED, colocated_rows))
        },
        "middle_colocated_ms": round(statistics.fmean(row.ttft_decode_ms or 0.0 for row in middle_colocated), 4),
        **causes_of(middle_pd, middle_colocated, total["median"]),
        **_handoffs(cell, pd_rows),
    }


_HANDOFF_KEYS = ("predicted_ms", "achieved_ms", "wire_ms", "request_to_ready_ms", "prefill_ms", "ceiling_gbs",
                 "fixed_ms", "clock_error_ms")  # fmt: skip


def _handoffs(cell: FinishedCell, rows: Sequence[RequestRow]) -> dict[str, Any]:
    """The transfers of the disaggregated requests ``rows`` of a cell, predicted and measured; null without any."""
    if not rows:
        return {**dict.fromkeys(_HANDOFF_KEYS), "transports_used": []}
    ceiling_gbs = statistics.median(_transfer(row, "ceiling_gbs") for row in rows)
    prefill_ms = statistics.fmean(row.stages_ms.get(Figure.TTFT_DECODE, {}).get("prefill", 0.0) for row in rows)
    values = (
        _predicted_ms(cell, ceiling_gbs, prefill_ms),
        statistics.fmean(_transfer(row, "exposed_ms") for row in rows),
        statistics.fmean(_transfer(row, "wire_ms") + _transfer(row, "import_ms") for row in rows),
        statistics.fmean(_transfer(row, "request_to_ready_ms") for row in rows),
        prefill_ms,
        ceiling_gbs,
        float(cell.facts.get("fixed_ms", 0.0)),
        max(row.clock_error_ms for row in rows),
    )
    rounded = (None if value is None else round(value, 4) for value in values)
    return {
        **dict(zip(_HANDOFF_KEYS, rounded, strict=True)),
        "transports_used": sorted({row.transport for row in rows}),
    }


def _transfer(row: RequestRow, key: str) -> float:
    return float(row.transfer.get(key, 0.0))


def _predicted_ms(cell: FinishedCell, ceiling_gbs: float, prefill_ms: float) -> float | None:
    """The exposed time that arithmetic gives; None if the link was not measured or the model's layers are unknown."""
    if not ceiling_gbs or cell.facts.get("layout") is None:
        return None
    overlap = cell.parameters["overlap"]
    chosen = cell.config.transfer.overlap if overlap == "as-configured" else overlap
    model = LinkModel.of(cell, int(cell.parameters["prompt_len"]), prefill_ms)
    return model.exposed_ms(chosen, ceiling_gbs) + float(cell.facts["fixed_ms"])


def _headline(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The cell that the answer is about: the first transport and overlap, at 512 tokens or the nearest length."""
    first = [
        cell for cell in cells if (cell["transport"], cell["overlap"]) == (cells[0]["transport"], cells[0]["overlap"])
    ]
    return min(first, key=lambda cell: abs(cell["prompt_len"] - _HEADLINE_LEN))


def _headline_under_load(summary: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The cell under load whose causes are drawn: that of the break-even, else the one with the highest rate among
    those of `_headline`'s length and place."""
    found = summary["break_even"]
    chosen = None if found is None else next((cell for cell in cells if cell["cell"] == found["cell"]), None)
    if chosen is not None:
        return chosen
    headline = _headline(cells)
    alike = [c for c in cells if (c["prompt_len"], *_place(c)) == (headline["prompt_len"], *_place(headline))]
    return max(alike, key=lambda cell: float(cell["rate"]))


def _answer(cells: Sequence[Mapping[str, Any]], run: RunData) -> str:
    idle = [cell for cell in cells if _plain(cell)] or cells
    if not idle:
        return "No pair of requests was completed."
    cell = _headline(idle)
    added = [cell["added_ttft_ms"][figure.value] for figure in Figure]
    token_1, token_2 = (added_text(token, each) for token, each in zip(("token 1", "token 2"), added, strict=True))
    where = f"With prompts of {cell['prompt_len']} tokens over {cell['transport']} on an idle service"
    beside = f" ({text})" if (text := beside_text(cell)) else ""
    sentences = [
        f"{where}{beside}, {token_1}, and {token_2}, the first that waits for the hand-off.",
        unclear_text(added, run, cell["cell"]),
    ]
    if Interval.from_dict(added[1]).sign:
        known = [cause for cause in cell["causes_ms"].items() if abs(cause[1]) > cell["clock_error_ms"]]
        named = " and ".join(f"{name} ({ms:+.2f} ms)" for name, ms in sorted(known, key=lambda c: -abs(c[1]))[:2])
        largest = f"The largest causes are {named}; together" if named else "No cause exceeds the clock error; together"
        sentences.append(f"{largest} the stages explain {cell['explained_pct']:.0f} % of what token 2 waits longer.")
    sentences += [
        f"With prompts of {other['prompt_len']} tokens, {added_text('token 2', total)}."
        for other in idle
        if other is not cell and (other["transport"], other["overlap"]) == (cell["transport"], cell["overlap"])
        if Interval.from_dict(total := other["added_ttft_ms"][Figure.TTFT_DECODE.value]).sign
    ]
    return " ".join(filter(None, sentences))


def _answer_under_load(summary: Mapping[str, Any], loaded: Sequence[Mapping[str, Any]]) -> str:
    if not loaded:
        return ""
    found = summary["break_even"]
    if found is None:
        return f"Under load no break-even was found: {summary['break_even_reason']}."
    shares = {arm: f"{100 * share:.0f} %" for arm, share in found["attainment"].items()}
    neither = found["neither"]
    onwards = (
        f"Of the {len(found['only_pd']) + len(neither)} measured loads from there on, only disaggregated requests meet "
        f"it in {len(found['only_pd'])}, and neither in {len(neither)}."
    )
    pays = "it pays" if found["distinct"] else "it was not shown to pay; in the measurement it does"
    others = [each for each in summary["break_evens"] if each["break_even"] is None]
    return (
        f"Under load ({found['transport']}, overlap {found['overlap']}) {pays} from prompts of {found['prompt_len']} "
        f"tokens at {found['rate']:g} requests/s on: there {shares[PD]} of the disaggregated requests meet the SLO "
        f"({slo_text(found['slo_ms'])}), and {shares[COLOCATED]} of the colocated ones. {onwards}"
        + ("" if found["distinct"] else " Their intervals overlap or are missing, so this may be chance.")
        + "".join(f" With {each['transport']}, overlap {each['overlap']}: {each['reason']}." for each in others)
    )


def _caveats(cells: Sequence[Mapping[str, Any]], loaded: bool) -> list[str]:
    caveats = ["An idle service has no queues: what disaggregation saves or costs under load is not in the idle cells."]
    if loaded:
        caveats.append(
            "The gap between token 1 and token 2 includes the hand-off, so in pd the SLO of the gaps limits the "
            "hand-off as well."
        )
        caveats.append(
            "Predictions are of an idle link and an idle decode worker, under load as well. What is exposed beyond "
            "them there waited for other hand-offs, for room in decode's pool, or for a core."
        )
    if cells:
        error_ms = max(cell["clock_error_ms"] for cell in cells)
        caveats.append(
            f"Stages between two workers are known to ± {error_ms:.3f} ms (clock offset); smaller differences of "
            "kv_exposed and dispatch mean nothing."
        )
    if any(cell["overlap"] == "as-configured" for cell in cells):
        caveats.append(
            "The service was running already and does not tell its settings: the predictions assume the default "
            "overlap, chunks and groups of layers."
        )
    if any(cell["n"] < MIN_VALUES for cell in cells):
        caveats.append(f"Cells with fewer than {MIN_VALUES} pairs have no intervals.")
    if any(cell["predicted_ms"] is None for cell in cells):
        caveats.append("No prediction where the link was not measured or the model's layers are unknown on this host.")
    return caveats


def _series(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells with the name of their line, and the megabytes that a request moves."""
    return [
        {**cell, "series": " · ".join(_place(cell)), "megabytes": cell["kv_bytes"] / cell["n"] / 1e6} for cell in cells
    ]


def _waterfall_picture(cell: Mapping[str, Any]) -> Picture:
    """The colocated ``ttft_decode``, what each stage adds to it, and the disaggregated one, which is both together."""
    idle = cell["load"] == "idle"
    added = Interval.from_dict(cell["added_ttft_ms"]["ttft_decode"])
    colocated_ms = cell["middle_colocated_ms"] if idle else cell["arms_ms"][COLOCATED]["ttft_decode"]
    causes = [(name, value) for name, value in cell["causes_ms"].items() if abs(value) >= 0.005]
    # What is unattributed and, of pairs, the distance of the middle half's mean from the median.
    causes.append(("unexplained", cell["unexplained_ms"]))
    starts = list(itertools.accumulate((value for _, value in causes), initial=colocated_ms))
    bars = [
        {"name": "colocated", "from": 0.0, "ms": colocated_ms, "color": ARM_LOOKS[COLOCATED]["color"], "form": ".2f"},
        *(
            {"name": name, "from": start, "ms": value, "color": COLORS.get(name, COLORS[UNATTRIBUTED]), "form": "+.2f"}
            for (name, value), start in zip(causes, starts, strict=False)
        ),
        {"name": "disaggregated", "from": 0.0, "ms": colocated_ms + added.value, "color": ARM_LOOKS[PD]["color"],
         "form": ".2f"},
    ]  # fmt: skip
    edges = [*starts, colocated_ms + added.value]
    margin = max(0.5 * (max(edges) - min(edges)), 0.5)
    low = max(0.0, min(edges) - margin)
    rows = [str(bar["name"]) for bar in bars]
    bars = [{**bar, "text": f"{bar['ms']:{bar['form']}}"} for bar in bars]
    panel = Panel(
        [Mark(bars, "ms", "name", kind="bars", to="from", text="text", look={"height": 0.68})],
        x=f"ms until token 2 is at the client{' (axis starts later than 0)' if low else ''}",
        rows=rows,
        xlim=(low, max(edges) + margin),
    )
    where = [f"{cell['prompt_len']} tokens", cell["transport"], *([] if idle else [f"{cell['rate']:g} requests/s"])]
    where += filter(None, (beside_text(cell),))
    means = f"Means over {cell['n']} requests of each arm"
    if idle:
        means = (
            f"Means over the middle half of {cell['n']} pairs, whose differences lie around the median; disaggregated "
            "is colocated and the median difference"
        )
    chance = "" if added.sign else " As no difference could be measured, its causes may be chance."
    return Picture(
        "causes" if idle else "causes_under_load",
        f"From colocated to disaggregated, stage by stage ({', '.join(where)})",
        f"{means}. Each bar is the difference of one stage between the arms. Together they are the added ttft_decode "
        f"of {added.text()}, except for {cell['unexplained_ms']:+.2f} ms that no stage explains.{chance}",
        [panel],
    )


def _length_picture(cells: Sequence[Mapping[str, Any]]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` over the prompt length, one line per transport and overlap."""
    lengths = sorted({cell["prompt_len"] for cell in cells})
    names = list(dict.fromkeys(cell["series"] for cell in cells))
    panels = [
        Panel(
            [
                *(mark for cell in cells for mark in _difference_marks(cell, figure, names.index(cell["series"]))),
                Mark(cells, "prompt_len", f"added_ttft_ms.{figure.value}", by="series"),
                Rule("y"),
            ],
            x="prompt length, tokens",
            y="added, ms",
            title=f"added {figure.value}",
            log="x",
            ticks=lengths,
            xlim=(lengths[0] / 1.3, lengths[-1] * 1.3),
            legend="" if number else "best",
        )
        for number, figure in enumerate(Figure)
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


def _difference_marks(cell: Mapping[str, Any], figure: Figure, number: int) -> list[Mark]:
    """The single differences behind a median, a little to its right; hollow where the pair was disturbed. Those more
    than eight times as far from the median as the middle half are drawn at that distance, as triangles."""
    added = cell["added_ttft_ms"][figure.value]
    lower, upper = np.percentile(added["differences_ms"], (25, 75))
    reach, color = 8 * max(float(upper - lower), 0.5), PALETTE[number % len(PALETTE)]
    low, high = added["median"] - reach, added["median"] + reach
    drawn: dict[tuple[str, str], list[dict[str, float]]] = {}
    for place, ms in enumerate(added["differences_ms"]):
        marker = "^" if ms > high else "v" if ms < low else "o"
        fill = "none" if place in (added["disturbed"] or ()) else color
        point = {"x": cell["prompt_len"] * 1.06, "ms": min(max(ms, low), high)}
        drawn.setdefault((marker, fill), []).append(point)
    return [
        Mark(points, "x", "ms", kind="points",
             look={"color": color, "marker": marker, "markerfacecolor": fill, "markersize": 3.2, "alpha": 0.45})
        for (marker, fill), points in drawn.items()
    ]  # fmt: skip


def _prediction_picture(cells: Sequence[Mapping[str, Any]]) -> Picture:
    """Exposed transfer time: what arithmetic gives, and what was measured."""
    known = [cell for cell in cells if cell["predicted_ms"] is not None]
    limit = 1.1 * max(max(cell["predicted_ms"], cell["achieved_ms"]) for cell in known)
    panel = Panel(
        [Mark(known, "predicted_ms", "achieved_ms", by="series", kind="points"), Rule("diagonal")],
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


def _times_picture(cells: Sequence[Mapping[str, Any]]) -> Picture:
    """Exposed, wire and request-to-ready time of every cell: three figures that are easily confused."""
    rows = [f"{cell['prompt_len']} · {cell['series']}" for cell in cells]
    kinds = {"achieved_ms": "exposed", "wire_ms": "on the wire", "request_to_ready_ms": "request to ready"}
    points = [
        {"row": row, "kind": kind, "ms": cell[key]}
        for key, kind in kinds.items()
        for row, cell in zip(rows, cells, strict=True)
    ]
    panel = Panel(
        [Mark(points, "ms", "row", by="kind", kind="points")], x="ms (logarithmic)", log="x", rows=rows, legend="above"
    )
    return Picture(
        "three_times",
        "Exposed, wire, and request-to-ready time",
        "Exposed is what the request waits for after its prompt is computed. The wire time is spent on moving bytes, "
        "most of it hidden behind the prefill. Request-to-ready spans from decode's allocation to the last block, and "
        "so contains the prefill.",
        [panel],
    )


def _width_picture(cells: Sequence[Mapping[str, Any]]) -> Picture:
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


def _first_token_picture(usual: Mapping[str, Any], late: Mapping[str, Any]) -> Picture:
    """Added ``ttft`` and ``ttft_decode`` with both settings of ``router.first_token``."""
    tokens = {"ttft": "token 1 (ttft)", "ttft_decode": "token 2 (ttft_decode)"}
    points = [
        {"setting": f"router.first_token: {name}", "token": token, "added": cell["added_ttft_ms"][key]}
        for name, cell in (("prefill", usual), ("decode", late))
        for key, token in tokens.items()
    ]
    panel = Panel(
        [Mark(points, "token", "added", by="setting", kind="points", look={"markersize": 7}), Rule("y")],
        y="added, ms",
        columns=list(tokens.values()),
        legend="above",
    )
    return Picture(
        "first_tokens",
        f"Who sends token 1 ({usual['prompt_len']} tokens, {usual['transport']})",
        "With prefill, the client gets token 1 as soon as it is sampled. With decode, it gets token 1 once the KV has "
        "arrived, as in services that discard prefill's token: then token 1 pays for the hand-off.",
        [panel],
    )


def _attainment_picture(cells: Sequence[Mapping[str, Any]]) -> Picture:
    """The share of requests that met the SLO over the rate, both arms: a column per prompt length, a row per transport
    and overlap."""
    lengths = sorted({cell["prompt_len"] for cell in cells})
    places = list(dict.fromkeys(" · ".join(_place(cell)) for cell in cells))
    panels: list[Panel] = []
    for place, length in itertools.product(places, lengths):
        own = [cell for cell in cells if (" · ".join(_place(cell)), cell["prompt_len"]) == (place, length)]
        points = [
            {"rate": cell["rate"], "arm": arm, "met": cell["attainment"][arm]}
            for cell in own
            for arm in (PD, COLOCATED)
        ]
        panel = attainment_panel(points, "offered load, requests/s")
        title = f"{length} tokens" + (f" · {place}" if len(places) > 1 else "")
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


def _table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    records = []
    for cell in cells:
        added = cell["added_ttft_ms"]["ttft_decode"]
        disturbed = None if added["disturbed"] is None else len(added["disturbed"])
        records.append({**cell, "mean": added["mean"], "disturbed": disturbed, "bytes": cell["kv_bytes"] // cell["n"]})
    columns = (
        "cell",
        "n",
        "added ttft, ms | added_ttft_ms.ttft:+",
        "added ttft_decode, ms | added_ttft_ms.ttft_decode:+",
        "its mean, ms | mean:+.2f",
        "disturbed pairs | disturbed",
        "explained, % | explained_pct:.1f",
        "predicted, ms | predicted_ms:.2f",
        "exposed, ms | achieved_ms:.2f",
        "on the wire, ms | wire_ms:.2f",
        "ceiling, GB/s | ceiling_gbs:.2f",
        "KV, bytes | bytes:,",
        "= expected | kv_bytes_equal",
        "tokens equal | tokens_equal",
    )
    return table(
        "All idle cells",
        records,
        columns,
        "Added: median of the pairs' differences. Disturbed: pairs beside which other processes used the machine; they "
        "count like all others. KV bytes per request; the ceiling is the best rate of the link so far.",
    )


def _load_table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    columns = (
        "cell",
        "requests per arm | n",
        "added ttft, ms | added_ttft_ms.ttft:+",
        "added ttft_decode, ms | added_ttft_ms.ttft_decode:+",
        "SLO met pd, % | attainment.pd.mean*100:.0f",
        "SLO met colocated, % | attainment.colocated.mean*100:.0f",
        "goodput pd, 1/s | goodput_rps.pd.mean:.2f",
        "goodput colocated, 1/s | goodput_rps.colocated.mean:.2f",
        "failed pd, colocated | errors.pd, errors.colocated",
        "lag p99 pd, colocated, ms | lag.pd.p99_ms:.1f, lag.colocated.p99_ms:.1f",
    )
    return table(
        "Under load",
        cells,
        columns,
        "Added: difference of the arms' means, disaggregated minus colocated. Latencies count from when a request was "
        "due.",
    )


def _load_causes_table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    records = []
    for cell in cells:
        causes_ms = cell["causes_ms"] or {}
        waiting_ms = sum(causes_ms[name] for name in QUEUES) if causes_ms else None
        other_ms = sum(causes_ms.values()) - waiting_ms if waiting_ms is not None else None
        records.append({**cell, "waiting_ms": waiting_ms, "other_ms": other_ms})
    columns = (
        "cell",
        "added by waiting, ms | waiting_ms:+.2f",
        "by other stages, ms | other_ms:+.2f",
        "unexplained, ms | unexplained_ms:+.2f",
        "explained, % | explained_pct:.1f",
        "predicted on an idle link, ms | predicted_ms:.2f",
        "exposed, ms | achieved_ms:.2f",
        "on the wire, ms | wire_ms:.2f",
        "request to ready, ms | request_to_ready_ms:.2f",
        "KV, bytes | kv_bytes:,",
        "= expected | kv_bytes_equal",
        "equal tokens, % | tokens_equal_share*100:.1f",
    )
    return table(
        "Under load: causes and hand-offs",
        records,
        columns,
        f"Differences of the arms' means of ttft_decode. Waiting: {', '.join(QUEUES)}. KV bytes of all requests.",
    )
