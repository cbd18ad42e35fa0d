"""``pdserve experiment sweep FILE``: both modes over every combination of transport, overlap mode, prompt length,
split, and rate that a YAML file lists.

Rate 0 is an idle service: pairs of requests, one at a time, A B B A. Any other rate is an open-loop load
(`experiments.modes`). Combinations with the same service settings share a service. The answer is that of
`experiments.added_ttft`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from experiments import overview
from experiments.added_ttft import break_even_of, linked_transports, report_of, slo_alike
from experiments.experiment import Cell
from experiments.matrix import IDLE, ModeMatrix, under_load
from experiments.modes import SLO, LoadPlan, PairOptions, Split
from experiments.report.page import Report
from experiments.run_folder import Figures, FinishedCell, Parameters, RunData
from experiments.workloads.conversation import Room, Workload
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig, Transport
from pdserve.core.errors import ConfigError, InvalidRequest

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
    def read(cls, path: Path | None) -> SweepOptions:
        """The sweep of a YAML file. InvalidRequest names the file and the key that is wrong."""
        if path is None:
            raise InvalidRequest("FILE: give the file that lists what to vary, or --resume DIR")
        known = ", ".join(sorted(cls.model_fields))
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(loaded, dict):
                raise InvalidRequest(f"must be a mapping with keys such as {known}")
            options = cls.model_validate(loaded)
            options.check()
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            problem = f"{first['msg']} (got {first['input']!r})"
            if first["type"] == "extra_forbidden":
                problem = f"unknown key; known are {known}"
            raise InvalidRequest(f"{path}: {key}: {problem}") from None
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
        if self.slo != "auto":
            SLO.parse(self.slo)
        elif any(self.rates) and 0 not in self.rates:
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

    name = "sweep"
    question = "How do both modes compare over transports, overlap modes, lengths, splits and loads?"
    options_type = SweepOptions
    options: SweepOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The product of the file's lists, ordered so that each service is started once. For a running service:
        prompt lengths and rates only."""
        options = self.options
        options.check()
        services: list[tuple[Sequence[str], Mapping[str, Any]]] = [
            (
                place,
                {
                    **options.service,
                    **Split.parse(place[0], "workers").settings,
                    "transfer.transport": place[1],
                    "transfer.overlap": place[2],
                },
            )
            for place in itertools.product(options.workers, options.transports, options.overlaps)
        ]
        if attached is not None:
            services = [(self._of(attached), {})]
        cells = []
        for (place, service), length, rate in itertools.product(services, options.prompt_lens, sorted(options.rates)):
            parameters = {**dict(zip(("workers", "transport", "overlap"), place, strict=True)), "prompt_len": length}
            load = {"load": f"rate-{rate:g}", "rate": rate} if rate else {"load": IDLE}
            name = "/".join(map(str, (*place, length, load["load"])))
            cells.append(self.cell(name, {**parameters, **load}, service, None if rate else options.repeats))
        return cells

    def _of(self, attached: ServiceStatus) -> Sequence[str]:
        """What a running service has in place of the dimensions that the experiment cannot change there."""
        for name in ("workers", "transports", "overlaps"):
            if len(getattr(self.options, name)) > 1:
                raise InvalidRequest(f"{name}: a running service has one; list one value with --target")
        if self.options.service:
            raise InvalidRequest("service: the settings of a running service are not changed; leave it out")
        longest = max(self.options.prompt_lens) + self.options.output_len
        if longest > Room.of(attached).tokens:
            raise InvalidRequest(f"prompt_lens: {longest} tokens exceed the {Room.of(attached).tokens} of the service")
        return Split.of(attached).name, "+".join(sorted(linked_transports(attached))), "as-configured"

    def load(self, parameters: Parameters) -> LoadPlan:
        """As the file says."""
        return LoadPlan(parameters["rate"], self.options.duration_s, self.options.repeats, self.options.seed)

    def workload(self, parameters: Parameters) -> Workload:
        """Random prompts of one length."""
        return Synthetic(Fixed(parameters["prompt_len"]), Fixed(self.options.output_len))

    def slo(self, cell: FinishedCell, run: RunData) -> SLO | None:
        """An automatic one comes from the idle cell that is like it otherwise."""
        return slo_alike(self.options.slo, cell, run)

    def found(self, cells: Sequence[Figures], run: RunData) -> dict[str, Any]:
        """The keys of `break_even_of`."""
        return break_even_of([cell for cell in cells if under_load(cell)])

    def report(self, run: RunData, summary: Figures) -> Report:
        """That of added-ttft, and the pictures of `experiments.overview`."""
        load = f"Poisson arrivals, {self.options.duration_s:g} s per mode and round, {self.options.repeats} rounds"
        report = report_of("Sweep", self.question, load, run, summary)
        report.blocks += overview.pictures([overview.Source("", run, summary)])
        return report
