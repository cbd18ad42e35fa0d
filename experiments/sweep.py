"""``pdserve experiment sweep FILE``: both modes over every combination of transport, overlap mode, prompt length,
split, and rate that a YAML file lists.

Rate 0 is an idle service: pairs of requests, one at a time, A B B A. Any other rate is an open-loop load
(`experiments.modes`). Combinations with the same service settings share a service. The answer is that of
`experiments.added_ttft`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from experiments import overview
from experiments.added_ttft import AddedTtft, linked_transports
from experiments.experiment import Cell
from experiments.matrix import IDLE
from experiments.modes import SLO, PairOptions, Split
from experiments.report.page import Report
from experiments.run_folder import Figures, Parameters, RunData
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

    @property
    def rounds(self) -> int:
        """Loads of each mode."""
        return self.repeats

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
            problem = f"{first['msg'].removeprefix('Value error, ')} (got {first['input']!r})"
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


class Sweep(AddedTtft):
    """See the module."""

    name = "sweep"
    title = "Sweep"
    question = "How do both modes compare over transports, overlap modes, lengths, splits and loads?"
    options_type = SweepOptions

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """The product of the file's lists, ordered so that each service is started once. For a running service:
        prompt lengths and rates only."""
        options = self.options
        options.check()
        places = [*itertools.product(options.workers, options.transports, options.overlaps)]
        if attached is not None:
            places = [self._of(attached)]
        cells = []
        for place, length, rate in itertools.product(places, options.prompt_lens, sorted(options.rates)):
            workers, transport, overlap = place
            service = {
                **options.service,
                **Split.parse(workers, "workers").settings,
                "transfer.transport": transport,
                "transfer.overlap": overlap,
            }
            load = {"load": f"rate-{rate:g}", "rate": rate} if rate else {"load": IDLE}
            parameters = {"workers": workers, "transport": transport, "overlap": overlap, "prompt_len": length, **load}
            name, pairs = "/".join(map(str, (*place, length, load["load"]))), None if rate else options.repeats
            cells.append(self.cell(name, parameters, {} if attached else service, pairs))
        return cells

    def _of(self, attached: ServiceStatus) -> tuple[str, str, str]:
        """What a running service has in place of the dimensions that the experiment cannot change there."""
        options, room = self.options, Room.of(attached).tokens
        for name in ("workers", "transports", "overlaps"):
            if len(getattr(options, name)) > 1:
                raise InvalidRequest(f"{name}: a running service has one; list one value with --target")
        if options.service:
            raise InvalidRequest("service: the settings of a running service are not changed; leave it out")
        if (longest := max(options.prompt_lens) + options.output_len) > room:
            raise InvalidRequest(f"prompt_lens: {longest} tokens exceed the {room} of the service")
        return Split.of(attached).name, "+".join(sorted(linked_transports(attached))), "as-configured"

    def workload(self, parameters: Parameters) -> Workload:
        """Random prompts of one length."""
        return Synthetic(Fixed(parameters["prompt_len"]), Fixed(self.options.output_len))

    def report(self, run: RunData, summary: Figures) -> Report:
        """That of added-ttft, and the pictures of `experiments.overview`."""
        report = super().report(run, summary)
        report.blocks += overview.pictures([overview.Source("", run, summary)])
        return report
