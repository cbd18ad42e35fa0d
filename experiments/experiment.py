"""What an experiment is: cells to measure, a summary computed from the raw data, and a report drawn from both.

Measuring and judging are apart. `Experiment.measure` only records rows and facts; `Experiment.summarise` and
`Experiment.report` are functions of what was recorded, so that ``pdserve report`` redraws a run without a service."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self, Unpack

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments.deployment import Deployment, Service, run_in_loop
from experiments.environment import BUSY, OtherRequests
from experiments.load import Load, Outcome, run_load
from experiments.report.page import Report
from experiments.run_folder import CONFIG, ENVIRONMENT, Figures, Parameters, RequestRow, RunData, RunFolder
from experiments.workloads.arrivals import Schedule
from experiments.workloads.conversation import Conversation
from ops.machine_load import CpuUse, own_processes
from ops.settled import settled
from pdserve.client.async_client import AsyncClient
from pdserve.client.generation import Generation
from pdserve.client.request import Prompt
from pdserve.client.status import ServiceStatus
from pdserve.client.target import Target
from pdserve.core.errors import CapacityExceeded, DeadlineExceeded, InvalidRequest, PdserveError
from pdserve.version import VERSION

_OVERLOAD = (CapacityExceeded.__name__, DeadlineExceeded.__name__)
"""Errors of requests that an overloaded service refuses or answers too late."""


def option(default: Any, *, quick: Any, **checks: Any) -> Any:
    """A field of `Options` with another default under ``--quick``."""
    return Field(default, json_schema_extra={"quick": quick}, **checks)


class Options(BaseModel):
    """Options of an experiment; each becomes an option of its command. Lists are written with commas."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    of_service: ClassVar[frozenset[str]] = frozenset({"model"})
    """The options that a running service (``--target``) does not take: it keeps its settings."""

    model: str = Field("dummy:135m", description="model of the services that are started (as model.path)")
    seed: int = Field(0, description="seed of prompts, arrivals and resampling")

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            lists = {name for name, each in cls.model_fields.items() if "tuple" in str(each.annotation)}
            return {
                key: [part.strip() for part in value.split(",") if part.strip()]
                if key in lists and isinstance(value, str)
                else value
                for key, value in data.items()
            }
        return data

    @classmethod
    def choose(cls, given: Mapping[str, Any], quick: bool = False) -> Self:
        """The options with ``given`` values (None: not given) on top of the defaults, those of a quick run if asked.
        InvalidRequest names the first wrong one."""
        values: dict[str, Any] = {}
        if quick:
            values = {name: default for name in cls.model_fields if (default := cls.quick_default(name)) is not None}
        values.update({name: value for name, value in given.items() if value is not None})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            option = "--" + str(first["loc"][0] if first["loc"] else "options").replace("_", "-")
            what = first["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"{option}: {what} (got {first['input']!r})") from None

    def fitting(self, lengths: Sequence[int], room: int, flag: str) -> list[int]:
        """Those of the prompt ``lengths`` that fit a running service, which has room for so many tokens. Defaults that
        do not fit are left out. InvalidRequest if one was chosen that does not, or if none does."""
        fit, name = [length for length in lengths if length <= room], flag.lstrip("-").replace("-", "_")
        usual = (type(self).model_fields[name].default, tuple(type(self).quick_default(name) or ()))
        if not fit or (len(fit) < len(lengths) and tuple(lengths) not in usual):
            raise InvalidRequest(f"{flag}: prompts of {max(lengths)} tokens do not fit, the service takes up to {room}")
        return fit

    @classmethod
    def quick_default(cls, name: str) -> Any:
        """The default of option ``name`` under ``--quick``; None if it is the usual one."""
        extra = cls.model_fields[name].json_schema_extra
        return extra.get("quick") if isinstance(extra, dict) else None


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of parameters. ``service`` are the dotted settings of the service that it needs; cells with equal
    settings share a service. None: the cell needs no service. ``work`` is the number of steps for the progress bar,
    ``sending_s`` the seconds that the cell's loads last, or within which pairs are added. ``may_overload``:
    the cell's load may exceed what the service sustains, so that requests which it refuses or answers too late are a
    result."""

    name: str
    parameters: Parameters
    service: Mapping[str, Any] | None = field(default_factory=dict)
    work: int = 1
    sending_s: float = 0.0
    may_overload: bool = False

    def spoiled_by(self, row: RequestRow) -> bool:
        """Whether a request of the cell failed by accident, so that a resumed run measures the cell again."""
        return row.error is not None and not (self.may_overload and row.error.partition(":")[0] in _OVERLOAD)


class Bench:
    """What `Experiment.measure` has at hand: the service of the cell, and where results go."""

    def __init__(
        self,
        cell: Cell,
        target: str | Target,
        record: Callable[[RequestRow], None],
        advance: Callable[[int], None],
        *,
        tell: Callable[[str], None] = lambda text: None,
        attached: bool = False,
        earlier: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``tell`` shows the user a text. ``attached``: the service was there before the experiment and serves others
        as well. ``earlier``: the facts of the cells that finished before this one, by name; a resumed run has them as
        well."""
        self.cell = cell
        self.target = target
        self.attached = attached
        self.earlier = dict(earlier or {})
        self.facts: dict[str, Any] = {}
        self.advance = advance
        self.tell = tell
        self._record = record
        self._processes, self._know_processes = own_processes(Target.of(target) if attached else None)
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the cell began."""
        return time.monotonic() - self._started_s

    def record(self, generation: Generation | None, error: PdserveError | None = None, **place: Any) -> RequestRow:
        """Write the row of a request of this cell. ``place`` has at least ``arm``, ``repeat`` and ``index``."""
        return self.write(RequestRow.of(generation, error, cell=self.cell.name, **place))

    def write(self, row: RequestRow) -> RequestRow:
        """Write a row that has no `Generation`, such as that of a request that the experiment ended early."""
        self._record(row)
        return row

    async def settle(self, client: AsyncClient, arm: str, timeout_s: float = 10.0) -> None:
        """Wait until the service is idle, before requests of ``arm`` are measured. Notes how many requests of others
        there are if it is not in time."""
        others = OtherRequests.of(await settled(client, timeout_s))
        if others is not None:
            self.facts.setdefault(BUSY, []).append({"arm": arm, **asdict(others)})
            self.tell(others.text(arm))

    async def send(
        self,
        client: AsyncClient,
        prompt: Prompt,
        *,
        arm: str,
        repeat: int,
        index: int,
        kind: str = "",
        due_s: float | None = None,
        **options: Any,
    ) -> RequestRow:
        """Send one request, wait for its end, and write its row. A failure is a row as well. ``due_s``: when an open
        loop had to send it; without it the request is alone on the service, and what other processes use is noted."""
        before, sent_s = CpuUse.now(self._processes), self.elapsed_s
        place: dict[str, Any] = {"arm": arm, "repeat": repeat, "index": index, "kind": kind, "sent_s": sent_s}
        place["scheduled_s"] = sent_s if due_s is None else due_s
        try:
            generation = await client.generate(prompt, ignore_eos=True, **options).result()
        except PdserveError as error:
            return self.record(None, error, **place)
        if due_s is None and self._know_processes:
            place["others_cpu_s"] = round(CpuUse.now(self._processes).others_s(before), 3)
        return self.record(generation, **place)

    async def load(
        self,
        client: AsyncClient,
        conversations: Iterable[Conversation],
        schedule: Schedule,
        *,
        arm: str,
        repeat: int,
        kind: str = "",
        settle_s: float = 10.0,
        step: int = 1,
        **options: Any,
    ) -> Load:
        """Once the service is idle, send a load (`run_load`, with its ``options``), and write a row per request. Each
        request, also one that was due too late to be sent, is ``step`` steps of the cell."""
        await self.settle(client, kind or arm, settle_s)
        begun_s = self.elapsed_s

        def record(outcome: Outcome) -> None:
            self.record(
                outcome.generation,
                outcome.error,
                arm=arm,
                repeat=repeat,
                index=outcome.index,
                turn=outcome.turn,
                kind=kind,
                scheduled_s=begun_s + outcome.scheduled_s,
                sent_s=begun_s + outcome.sent_s,
            )
            self.advance(step)

        load = await run_load(client, conversations, schedule, on_done=record, **options)
        self.advance(step * load.unsent)
        return load

    def run(self, measuring: Callable[[Bench], Any]) -> None:
        """Run the coroutine function ``measuring``."""
        run_in_loop(measuring(self))


class RunKind(ABC):
    """A kind of run folder: how summary and report follow from its raw data."""

    name: ClassVar[str]
    """Of the command and of the results folder."""
    question: ClassVar[str]
    """What it answers, in one sentence."""
    options_type: ClassVar[type[Options]]
    other_options: ClassVar[frozenset[str]]
    """Names of the options in ``config.yaml`` that are not of ``options_type``."""
    fixed_options: ClassVar[Mapping[str, Any]] = {}
    """Options that earlier versions had, with the values that they have in every run now."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def of(cls, folder: RunFolder) -> Self:
        """The run in ``folder``, with its options. InvalidRequest names an option that this version does not know, or
        does not allow."""
        _, saved = folder.config
        known, path = cls.options_type.model_fields.keys(), folder.path / CONFIG
        if unknown := sorted(saved.keys() - known - cls.other_options - cls.fixed_options.keys()):
            raise InvalidRequest(
                f"{path}: options.{unknown[0]}: {cls.name} of pdserve {VERSION} has no such option; use the version "
                f"that wrote the run ({ENVIRONMENT}: machine.pdserve)"
            )
        try:
            return cls(cls.options_type.choose({key: value for key, value in saved.items() if key in known}))
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error}") from None

    def deployment(self, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
        """Where the services of the cells run: on this host, or the one that is there."""
        return Deployment(report=report, **service)

    @abstractmethod
    def summarise(self, run: RunData) -> dict[str, Any]:
        """The figures of ``summary.json``, from the raw data of the finished cells alone. The key ``failed``, if there,
        lists what makes the run fail (a token or byte that differs)."""

    @abstractmethod
    def report(self, run: RunData, summary: Figures) -> Report:
        """The report: answer, pictures, tables, caveats."""


class Experiment(RunKind):
    """One question, and the way to its answer."""

    other_options: ClassVar[frozenset[str]] = frozenset({"target", "config", "settings"})
    simulated: ClassVar[bool] = False
    """Its cells measure nothing of this machine, so that its load does not matter."""
    needs_own: ClassVar[str] = ""
    """Why it measures no service that runs already (empty: it does)."""
    starts_other_engines: ClassVar[bool] = False
    """Although it ``needs_own`` services, it measures other engines, too: it starts the service of each cell."""

    @abstractmethod
    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        """What is to be measured, in order. ``attached``: the service that was given with ``--target``, whose settings
        the experiment cannot change; None if it starts services itself. InvalidRequest if that cannot work."""

    @abstractmethod
    async def measure(self, bench: Bench) -> None:
        """Measure ``bench.cell``: write rows and facts."""

    def finished(self, summary: Figures) -> None:
        """What is to be done at the end of a run that was not interrupted, beside the report."""
