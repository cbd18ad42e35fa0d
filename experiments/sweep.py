"""``pdserve experiment sweep FILE``: both modes over every combination of transport, overlap mode, prompt length,
split, and rate that a YAML file lists.

Rate 0 is an idle service: pairs of requests, one at a time, A B B A. Any other rate is an open-loop load
(`experiments.modes`). Combinations with the same service settings share a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError

from experiments import overview
from experiments.experiment import Cell, Options
from experiments.modes import (
    COLOCATED,
    PD,
    LoadPlan,
    ModeMatrix,
    PairOptions,
    Split,
    added_ms,
    added_text,
    check_slo,
    latencies,
    load_caveats,
    pairs_of,
    summarise_load,
)
from experiments.report.drawing import table
from experiments.report.page import Report, setup_of
from experiments.run_folder import RequestRow, RunData, unexpected_bytes
from experiments.statistics import mean_interval
from experiments.workloads.conversation import Room, Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig, Transport
from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.interval import MIN_VALUES, apart
from pdserve.core.timeline import Figure

Overlap = Literal["none", "chunk", "layer"]


class SweepOptions(PairOptions):
    """The keys of a sweep's file. Lists are the dimensions of the matrix."""

    transports: tuple[Transport, ...] = Field(("auto",), min_length=1, description="transports")
    overlaps: tuple[Overlap, ...] = Field(("layer",), min_length=1, description="overlap modes")
    prompt_lens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (128, 512), min_length=1, description="prompt lengths in tokens"
    )
    workers: tuple[str, ...] = Field(("1P1D",), min_length=1, description="splits, such as 2P1D")
    rates: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = Field(
        (0.0,), min_length=1, description="loads in requests/s; 0 is one request at a time"
    )
    repeats: int = Field(6, ge=1, le=10_000, description="pairs at rate 0, and loads of each mode at other rates")
    output_len: int = Field(16, ge=2, description="tokens that each request generates")
    duration_s: float = Field(10.0, gt=0, le=86_400, description="seconds of each load")
    slo: str = Field("auto", description="limits in ms: ttft=200,itl=50; auto: twice the idle colocated latencies")
    service: dict[str, Any] = Field(default_factory=dict, description="dotted settings of every service")

    @classmethod
    def read(cls, path: Path) -> SweepOptions:
        """The sweep of a YAML file. InvalidRequest names the file and the key that is wrong."""
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(loaded, dict):
            raise InvalidRequest(f"{path}: must be a mapping with keys such as {', '.join(sorted(cls.model_fields))}")
        try:
            options = cls.model_validate(loaded)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "(the file)"
            if first["type"] == "extra_forbidden":
                raise InvalidRequest(
                    f"{path}: {key}: unknown key; known are {', '.join(sorted(cls.model_fields))}"
                ) from None
            raise InvalidRequest(f"{path}: {key}: {first['msg']} (got {first['input']!r})") from None
        try:
            options.check()
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error}") from None
        return options

    def check(self) -> None:
        """InvalidRequest names the first key whose value is wrong."""
        for name in ("transports", "overlaps", "prompt_lens", "workers", "rates"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise InvalidRequest(f"{name}: a value is given twice")
        for split in self.workers:
            Split.parse(split, "workers")
        try:
            check_slo(self.slo)
        except InvalidRequest as error:
            raise InvalidRequest(str(error).removeprefix("--")) from None
        if self.slo == "auto" and any(self.rates) and 0 not in self.rates:
            raise InvalidRequest("slo: auto goes by idle requests; add 0 to rates, or write limits: ttft=200,itl=50")
        try:
            PdserveConfig.load(None, self.service)
        except ConfigError as error:
            raise InvalidRequest(f"service: {error}") from None
        fixed = {"cluster.prefill", "cluster.decode", "transfer.transport", "transfer.overlap", "model.path"}
        for key in sorted(fixed & self.service.keys()):
            raise InvalidRequest(f"service: {key} is set by workers, transports, overlaps or model; leave it out")


class Sweep(ModeMatrix):
    """See the module."""

    name: ClassVar[str] = "sweep"
    question: ClassVar[str] = "How do both modes compare over transports, overlap modes, lengths, splits and loads?"
    options_type: ClassVar[type[SweepOptions]] = SweepOptions
    options: SweepOptions

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.output_len = self.options.output_len

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The product of the file's lists, ordered so that each service is started once. For a running service:
        prompt lengths and rates only."""
        options = self.options
        options.check()
        if attached is None:
            services = [
                (
                    {"workers": workers, "transport": transport, "overlap": overlap},
                    {
                        **options.service,
                        **Split.parse(workers, "workers").settings,
                        "transfer.transport": transport,
                        "transfer.overlap": overlap,
                    },
                )
                for workers in options.workers
                for transport in options.transports
                for overlap in options.overlaps
            ]
        else:
            services = [(self._of(attached), {})]
        cells = []
        for place, service in services:
            for length in options.prompt_lens:
                for rate in sorted(options.rates):
                    load = f"rate-{rate:g}" if rate else "idle"
                    parameters = {**place, "prompt_len": length, "load": load, **({"rate": rate} if rate else {})}
                    work = self.load(rate).planned() if rate else options.repeats
                    sending_s = self.load(rate).sending_s if rate else options.pairs_s
                    name = "/".join(map(str, (*place.values(), length, load)))
                    cells.append(Cell(name, parameters, service, work, sending_s, may_overload=bool(rate)))
        return cells

    def _of(self, attached: ServiceStatus) -> dict[str, Any]:
        """What a running service has in place of the dimensions that the experiment cannot change there."""
        for name in ("workers", "transports", "overlaps"):
            if len(getattr(self.options, name)) > 1:
                raise InvalidRequest(f"{name}: a running service has one; list one value with --target")
        if self.options.service:
            raise InvalidRequest("service: the settings of a running service are not changed; leave it out")
        longest = max(self.options.prompt_lens) + self.options.output_len
        if longest > Room.of(attached).tokens:
            raise InvalidRequest(f"prompt_lens: {longest} tokens exceed the {Room.of(attached).tokens} of the service")
        transports = sorted({link.transport for worker in attached.workers for link in worker.links})
        return {"workers": Split.of(attached).name, "transport": "+".join(transports), "overlap": "as-configured"}

    def load(self, rate: float) -> LoadPlan:
        """As the file says."""
        return LoadPlan(rate, self.options.duration_s, self.options.repeats, self.options.seed)

    def workload(self, prompt_len: int) -> Workload:
        """Random prompts of one length."""
        return Synthetic(Fixed(prompt_len), Fixed(self.options.output_len))

    def least_pairs(self) -> int:
        """As the file says."""
        return self.options.repeats

    def summarise(self, run: RunData) -> dict[str, Any]:
        """``cells``, one per combination: ``cell``, its parameters, ``exposed_ms``, ``kv_bytes``,
        ``kv_bytes_expected``, ``kv_bytes_equal``; ``n``, ``errors``, ``added_ttft_ms``, ``arms_ms``, ``tokens_equal``,
        ``tokens_equal_share``, at rate 0 of pairs; under load the keys of `summarise_load`."""
        cells = []
        for cell in run.cells:
            rows = run.rows_of(cell.cell)
            if not rows:
                continue
            exposed = mean_interval(_exposed_ms(rows), self.options.seed)
            if "rate" in cell.parameters:
                figures = summarise_load(cell, rows, self.slo(self.options.slo, cell, run), self.options.seed)
            else:
                figures = _summarise_idle(rows)
            cells.append({
                "cell": cell.cell,
                **cell.parameters,
                "exposed_ms": None if exposed is None else exposed.to_dict(),
                **figures,
            })  # fmt: skip
        return {"experiment": self.name, "cells": cells, "failed": self.failed(run)}

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        """The pictures of `experiments.overview`, and a table."""
        cells: Sequence[Mapping[str, Any]] = summary["cells"]
        loaded = [cell for cell in cells if cell["load"] != "idle"]
        report = Report(
            title="Sweep",
            question=self.question,
            answer=_answer(cells),
            setup=setup_of(
                run,
                f"{self.options.repeats} repeats, A B B A; rate 0: one request at a time; otherwise Poisson arrivals "
                f"for {self.options.duration_s:g} s; intervals are 95 % bootstrap",
            ),
            caveats=[
                *load_caveats(loaded),
                *(
                    [f"Fewer than {MIN_VALUES} repeats: there are no intervals."]
                    if self.options.repeats < MIN_VALUES
                    else []
                ),
            ],
            failures=summary["failed"],
        )
        report.blocks += overview.pictures([overview.Source("", run, summary)])
        if cells:
            columns = (
                "cell",
                "n",
                "failed",
                "added ttft, ms | added_ttft_ms.ttft",
                "added ttft_decode, ms | added_ttft_ms.ttft_decode",
                "exposed, ms | exposed_ms",
                "SLO met pd, % | attainment.pd.mean*100:.0f",
                "SLO met colocated, % | attainment.colocated.mean*100:.0f",
            )
            records = [{**cell, "failed": sum(cell["errors"].values())} for cell in cells]
            report.blocks.append(table("All cells", records, columns))
        return report


def _exposed_ms(rows: Sequence[RequestRow]) -> list[float]:
    return [float(row.transfer["exposed_ms"]) for row in rows if row.arm == PD and "exposed_ms" in row.transfer]


def _summarise_idle(rows: Sequence[RequestRow]) -> dict[str, Any]:
    done = {arm: [row for row in rows if row.arm == arm and row.error is None] for arm in (PD, COLOCATED)}
    pairs, _ = pairs_of(rows)
    equal = [pd.token_hash == colocated.token_hash for pd, colocated in pairs]
    return {
        "n": len(pairs),
        "errors": {arm: sum(row.arm == arm and row.error is not None for row in rows) for arm in (PD, COLOCATED)},
        "added_ttft_ms": {figure.value: added_ms(pairs, figure) for figure in Figure},
        "arms_ms": {arm: latencies(each) for arm, each in done.items()},
        "tokens_equal": all(equal) if equal else None,
        "tokens_equal_share": sum(equal) / len(equal) if equal else None,
        "kv_bytes": sum(row.kv_bytes for row in done[PD]),
        "kv_bytes_expected": sum(row.kv_bytes_expected for row in done[PD]),
        "kv_bytes_equal": unexpected_bytes(rows) is None,
    }


def _answer(cells: Sequence[Mapping[str, Any]]) -> str:
    idle = [cell for cell in cells if cell["load"] == "idle" and cell["added_ttft_ms"]["ttft_decode"]]
    sentences = []
    if idle:
        by_added = sorted(idle, key=lambda cell: cell["added_ttft_ms"]["ttft_decode"]["median"])
        least, most = by_added[0], by_added[-1]
        ends = (least,) if least is most else (least, most)
        texts = [f"{added_text('token 2', each['added_ttft_ms']['ttft_decode'])} in {each['cell']}" for each in ends]
        sentences.append(f"On an idle service {' and '.join(texts)}.")
    judged = [cell for cell in cells if cell["load"] != "idle" and cell["slo_ms"]]
    if judged:
        signs = [apart(cell["attainment"][PD], cell["attainment"][COLOCATED]) for cell in judged]
        better, worse = signs.count(1), signs.count(-1)
        sentences.append(
            f"Of {len(judged)} cells under load, disaggregated requests met the SLO more often in {better}, less often "
            f"in {worse}, and indistinguishably in {len(judged) - better - worse}."
        )
    return " ".join(sentences) or "No pair of requests was completed."
