"""``pdserve experiment added-ttft``: what disaggregation adds to the time to first token, and which stages it goes to.

Idle cells send the same prompt in both modes, one request at a time, in the order A B B A. So the difference is the
hand-off's and not that of a queue. The difference of the means of every stage is a *cause*; the causes sum to the added
``ttft_decode`` except for the difference of what the breakdowns leave unattributed.

The prediction of the exposed transfer time is arithmetic: the prompt's bytes over the measured ceiling of the link, in
the parts that the overlap mode makes of them (`ops.doctor.handoff_prediction`), plus the fixed cost of a hand-off. The
fixed cost is measured on the same link with prompts of one block before the cell."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.model.source import resolve_model
from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.plots import added_ttft as plots
from experiments.report.page import Report, TableBlock
from experiments.report.setup import setup_of
from experiments.request_row import RequestRow
from experiments.run_folder import FinishedCell, RunData
from experiments.shapes.widths import WIDTHS, model_path
from experiments.statistics import Interval, abba, mean_interval
from ops.doctor.handoff_prediction import HandoffPlan, LinkRate, predict
from pdserve.client.async_client import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.kv_layout import KVLayout
from pdserve.core.timeline import STAGE_NAMES, UNATTRIBUTED, Figure

_WARM_UP_PAIRS = 2
_CALIBRATIONS = 6
_OUTPUT_TOKENS = 4
PD, COLOCATED = "pd", "colocated"


class AddedTtftOptions(Options):
    """Options of `AddedTtft`."""

    prompt_lens: tuple[int, ...] = Field(
        (128, 512, 1024, 2048), description="prompt lengths in tokens", json_schema_extra={"quick": [128, 512]}
    )
    transports: tuple[str, ...] = Field(("shm", "tcp"), description="transports to compare")
    overlaps: tuple[Literal["none", "chunk", "layer"], ...] = Field(
        ("layer", "chunk", "none"),
        description="overlap modes to compare (see transfer.overlap)",
        json_schema_extra={"quick": ["layer", "none"]},
    )
    pairs: int = Field(20, ge=1, description="pairs of requests per cell", json_schema_extra={"quick": 8})
    widths: tuple[str, ...] = Field(
        ("mha", "gqa", "mla", "mqa"),
        description="KV widths of one model to compare (mha, gqa, mla, mqa; '' for none)",
        json_schema_extra={"quick": ["mha", "mqa"]},
    )
    width_prompt_len: int = Field(512, ge=1, description="prompt length of the comparison of KV widths")


class AddedTtft(Experiment):
    """See the module."""

    name: ClassVar[str] = "added-ttft"
    question: ClassVar[str] = "How much does disaggregation add to the time to first token, and where does it go?"
    options_type: ClassVar[type[Options]] = AddedTtftOptions
    options: AddedTtftOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """One cell per prompt length, transport and overlap; then one per KV width. For a running service: one per
        prompt length, with the transport and the model it has."""
        options = self.options
        work = options.pairs
        if attached is not None:
            transports = {link.transport for worker in attached.workers for link in worker.links}
            if not transports:
                raise InvalidRequest("target: the service has no linked pair of prefill and decode workers")
            fit = [length for length in options.prompt_lens if length + _OUTPUT_TOKENS <= attached.context_length]
            if not fit:
                raise InvalidRequest(f"--prompt-lens: none fits the service's context of {attached.context_length}")
            return [
                Cell(
                    f"{length}/{'+'.join(sorted(transports))}/as-configured/idle",
                    {
                        "prompt_len": length,
                        "transport": "+".join(sorted(transports)),
                        "overlap": "as-configured",
                        "load": "idle",
                    },
                    work=work,
                )
                for length in fit
            ]
        unknown = [width for width in options.widths if width not in WIDTHS]
        if unknown:
            raise InvalidRequest(f"--widths: {unknown[0]!r} is none of {', '.join(WIDTHS)}")
        cells = [
            Cell(
                f"{length}/{transport}/{overlap}/idle",
                {"prompt_len": length, "transport": transport, "overlap": overlap, "load": "idle"},
                {"transfer.transport": transport, "transfer.overlap": overlap},
                work,
            )
            for transport in options.transports
            for overlap in options.overlaps
            for length in options.prompt_lens
        ]
        transport, overlap = options.transports[0], options.overlaps[0]
        cells += [
            Cell(
                f"width-{width}/{options.width_prompt_len}/{transport}/{overlap}",
                {
                    "prompt_len": options.width_prompt_len,
                    "transport": transport,
                    "overlap": overlap,
                    "load": "idle",
                    "width": width,
                },
                {"model.path": model_path(width), "transfer.transport": transport, "transfer.overlap": overlap},
                work,
            )
            for width in options.widths
        ]
        return cells

    async def measure(self, bench: Bench) -> None:
        """Calibrate the link, then send the pairs."""
        length = int(bench.cell.parameters["prompt_len"])
        draw = random.Random(f"{self.options.seed}/{bench.cell.name}")
        async with AsyncClient(bench.target) as client:
            status = await client.status()
            bench.facts |= _layout_facts(status)

            async def pair(number: int, prompt: Sequence[int], arms: Sequence[str]) -> None:
                for arm in arms:
                    salt = f"{self.options.seed}/{bench.cell.name}/{number}/{arm}/{draw.random()}"
                    await bench.send(
                        client, prompt, arm=arm, repeat=0, index=number, mode=arm, max_tokens=_OUTPUT_TOKENS, salt=salt
                    )

            def prompt(tokens: int) -> list[int]:
                return [draw.randrange(status.vocab_size) for _ in range(tokens)]

            fixed_ms = []
            for _ in range(_CALIBRATIONS):
                done = await client.generate(
                    prompt(2), mode=PD, max_tokens=2, ignore_eos=True, salt=str(draw.random())
                ).result()
                wire_ms = done.kv_bytes / done.transfer.ceiling_gbs / 1e6 if done.transfer.ceiling_gbs else 0.0
                fixed_ms.append(max(0.0, done.transfer.exposed_ms - wire_ms))
            bench.facts["fixed_ms"] = statistics.median(fixed_ms[1:])
            for _ in range(_WARM_UP_PAIRS):
                for arm in (PD, COLOCATED):
                    await client.generate(
                        prompt(length),
                        mode=arm,
                        max_tokens=_OUTPUT_TOKENS,
                        ignore_eos=True,
                        salt=f"warm/{draw.random()}",
                    ).result()
            for number, arms in enumerate(abba(PD, COLOCATED, self.options.pairs)):
                await pair(number, prompt(length), arms)
                bench.advance(1)

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``cells`` and ``break_even``; see docs/experiments.md."""
        cells = [
            summary for cell in run.cells if (summary := _summarise_cell(cell, run, self.options.seed)) is not None
        ]
        failed = [
            f"{cell['cell']}: {what}"
            for cell in cells
            for what, wrong in (
                ("tokens differ between the arms", not cell["tokens_equal"]),
                ("bytes moved differ from bytes expected", cell["kv_bytes"] != cell["kv_bytes_expected"]),
                (f"{cell['errors']} requests failed", cell["errors"]),
            )
            if wrong
        ]
        return {
            "experiment": self.name,
            "cells": cells,
            "break_even": None,
            "break_even_reason": "no load was measured: give --rates",
            "failed": failed,
        }

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The waterfall of causes, the curves over length, prediction against measurement, KV widths, and a table."""
        cells: list[Mapping[str, Any]] = summary["cells"]
        report = Report(
            title="What disaggregation adds to TTFT",
            question=self.question,
            answer=_answer(cells),
            setup=setup_of(
                run, "the same prompts in both modes, one request at a time, A B B A; intervals are 95 % bootstrap"
            ),
            caveats=_caveats(cells),
            failures=summary["failed"],
        )
        idle = [cell for cell in cells if not cell.get("width")]
        if idle:
            report.blocks += [plots.waterfall_of_causes(_headline(idle)), plots.over_length(idle)]
            if any(cell["predicted_ms"] is not None for cell in idle):
                report.blocks.append(plots.predicted_and_achieved(idle))
            report.blocks.append(plots.three_times(idle))
        widths = [cell for cell in cells if cell.get("width")]
        if len(widths) > 1:
            report.blocks.append(plots.over_width(widths))
        report.blocks.append(_table(cells))
        return report


def _layout_facts(status: ServiceStatus) -> dict[str, Any]:
    """The geometry of the model's KV, where it is known on this host."""
    facts: dict[str, Any] = {"block_size": status.block_size, "kv_bytes_per_token": status.kv_bytes_per_token}
    try:
        shape = resolve_model(status.model).shape
    except ModelError:
        return facts
    layout = {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    return {**facts, "layout": {**layout, "dtype": status.dtype}}


def _summarise_cell(cell: FinishedCell, run: RunData, seed: int) -> dict[str, Any] | None:
    pairs, errors = _pairs(run.rows_of(cell.cell))
    if not pairs:
        return None
    added = {
        figure: mean_interval(
            [
                pd_ms - colocated_ms
                for pd, colocated in pairs
                if (pd_ms := pd.figure_ms(figure)) is not None
                and (colocated_ms := colocated.figure_ms(figure)) is not None
            ],
            seed,
        )
        for figure in Figure
    }
    stages = {
        name: statistics.fmean(
            pd.stages_ms[Figure.TTFT_DECODE].get(name, 0.0) - colocated.stages_ms[Figure.TTFT_DECODE].get(name, 0.0)
            for pd, colocated in pairs
        )
        for name in (*STAGE_NAMES, UNATTRIBUTED)
    }
    unexplained = stages.pop(UNATTRIBUTED)
    total = added[Figure.TTFT_DECODE]
    assert total is not None
    pd_rows = [pd for pd, _ in pairs]
    ceiling_gbs = statistics.median(float(row.transfer.get("ceiling_gbs", 0.0)) for row in pd_rows)
    prefill_ms = statistics.fmean(row.stages_ms[Figure.TTFT_DECODE].get("prefill", 0.0) for row in pd_rows)
    return {
        "cell": cell.cell,
        **cell.parameters,
        "n": len(pairs),
        "errors": errors,
        "added_ttft_ms": {figure.value: each.to_dict() for figure, each in added.items() if each is not None},
        "arms_ms": {
            arm: {
                figure.value: round(
                    statistics.fmean(ms for row in rows if (ms := row.figure_ms(figure)) is not None), 4
                )
                for figure in Figure
            }
            for arm, rows in ((PD, pd_rows), (COLOCATED, [colocated for _, colocated in pairs]))
        },
        "causes_ms": {name: round(value, 4) for name, value in stages.items()},
        "unexplained_ms": round(unexplained, 4),
        "explained_pct": round(100 * (1 - abs(unexplained) / abs(total.mean)), 2) if total.mean else 100.0,
        "predicted_ms": _predicted_ms(cell, ceiling_gbs, prefill_ms / 1e3),
        "achieved_ms": round(statistics.fmean(_transfer(row, "exposed_ms") for row in pd_rows), 4),
        "wire_ms": round(
            statistics.fmean(_transfer(row, "wire_ms") + _transfer(row, "import_ms") for row in pd_rows), 4
        ),
        "request_to_ready_ms": round(statistics.fmean(_transfer(row, "request_to_ready_ms") for row in pd_rows), 4),
        "prefill_ms": round(prefill_ms, 4),
        "ceiling_gbs": round(ceiling_gbs, 4),
        "fixed_ms": round(float(cell.facts.get("fixed_ms", 0.0)), 4),
        "clock_error_ms": round(max(row.clock_error_ms for row in pd_rows), 4),
        "transports_used": sorted({row.transport for row in pd_rows}),
        "kv_bytes": sum(row.kv_bytes for row in pd_rows),
        "kv_bytes_expected": sum(row.kv_bytes_expected for row in pd_rows),
        "tokens_equal": all(pd.token_hash == colocated.token_hash for pd, colocated in pairs),
    }


def _transfer(row: RequestRow, key: str) -> float:
    return float(row.transfer.get(key, 0.0))


def _pairs(rows: Sequence[RequestRow]) -> tuple[list[tuple[RequestRow, RequestRow]], int]:
    """The pairs of which both requests succeeded, and the number of failed requests."""
    by_index: dict[int, dict[str, RequestRow]] = {}
    for row in rows:
        if row.error is None:
            by_index.setdefault(row.index, {})[row.arm] = row
    pairs = [(arms[PD], arms[COLOCATED]) for arms in by_index.values() if len(arms) == 2]
    return pairs, sum(row.error is not None for row in rows)


def _predicted_ms(cell: FinishedCell, ceiling_gbs: float, prefill_s: float) -> float | None:
    """The exposed time that arithmetic gives; None if the link was not measured or the model's layers are unknown."""
    shape = cell.facts.get("layout")
    overlap = cell.parameters["overlap"]
    if not ceiling_gbs or shape is None:
        return None
    defaults = PdserveConfig()
    layout = KVLayout.uniform(
        "", shape["dtype"], cell.facts["block_size"], shape["num_layers"], shape["num_kv_heads"], shape["head_dim"]
    )
    plan = HandoffPlan(
        layout,
        int(cell.parameters["prompt_len"]),
        defaults.engine.max_num_batched_tokens,
        defaults.transfer.overlap if overlap == "as-configured" else overlap,
        defaults.transfer.layer_groups,
    )
    exposed_s = predict(plan.parts(), LinkRate(ceiling_gbs), prefill_s).exposed_s
    return round(exposed_s * 1e3 + float(cell.facts["fixed_ms"]), 4)


def _headline(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The cell that the answer is about: the first transport and overlap, at 512 tokens or the nearest length."""
    first = [
        cell for cell in cells if (cell["transport"], cell["overlap"]) == (cells[0]["transport"], cells[0]["overlap"])
    ]
    return min(first, key=lambda cell: abs(cell["prompt_len"] - 512))


def _answer(cells: Sequence[Mapping[str, Any]]) -> str:
    idle = [cell for cell in cells if not cell.get("width")] or cells
    if not idle:
        return "No pair of requests was completed."
    cell = _headline(idle)
    token_1, token_2 = (Interval.from_dict(cell["added_ttft_ms"][figure.value]) for figure in Figure)
    causes = sorted(cell["causes_ms"].items(), key=lambda cause: -abs(cause[1]))[:2]
    named = " and ".join(f"{name} ({value:+.2f} ms)" for name, value in causes)
    return (
        f"With prompts of {cell['prompt_len']} tokens over {cell['transport']} on an idle service, disaggregation adds "
        f"{token_1.text()} to token 1 and {token_2.text()} to token 2, the first that has paid for the hand-off. "
        f"The largest causes are {named}; together the stages explain {cell['explained_pct']:.0f} % of it."
    )


def _caveats(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    caveats = ["An idle service has no queues: what disaggregation saves or costs under load is not in these figures."]
    if cells:
        error_ms = max(cell["clock_error_ms"] for cell in cells)
        caveats.append(
            f"Stages between two workers are known to ± {error_ms:.3f} ms (clock offset); smaller differences of "
            "kv_exposed and dispatch mean nothing."
        )
    if any(cell["n"] < 5 for cell in cells):
        caveats.append("Cells with fewer than five pairs have intervals that are too wide to rely on.")
    if any(cell["predicted_ms"] is None for cell in cells):
        caveats.append("No prediction where the link was not measured or the model's layers are unknown on this host.")
    return caveats


def _table(cells: Sequence[Mapping[str, Any]]) -> TableBlock:
    header = ("cell", "n", "added ttft, ms", "added ttft_decode, ms", "explained, %", "predicted, ms", "exposed, ms",
              "on the wire, ms", "ceiling, GB/s", "KV, bytes", "= expected", "tokens equal")  # fmt: skip
    rows = []
    for cell in cells:
        intervals = [Interval.from_dict(cell["added_ttft_ms"][figure.value]) for figure in Figure]
        rows.append(
            (
                cell["cell"],
                str(cell["n"]),
                *(f"{each.mean:+.2f} [{each.lo:.2f}, {each.hi:.2f}]" for each in intervals),
                f"{cell['explained_pct']:.1f}",
                "–" if cell["predicted_ms"] is None else f"{cell['predicted_ms']:.2f}",
                f"{cell['achieved_ms']:.2f}",
                f"{cell['wire_ms']:.2f}",
                f"{cell['ceiling_gbs']:.2f}",
                f"{cell['kv_bytes'] // cell['n']:,}",
                "yes" if cell["kv_bytes"] == cell["kv_bytes_expected"] else "NO",
                "yes" if cell["tokens_equal"] else "NO",
            )
        )
    return TableBlock("All cells", header, rows, "KV bytes per request; ceiling as measured when the link was opened.")
