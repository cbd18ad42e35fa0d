"""The folder of one run: ``results/<name>/<stamp>/``. It holds everything from which the report is drawn.

================== ====================================================================================================
``config.yaml``     the schema of the folder, the experiment's name and all its options, so that the run can be resumed
                    or repeated
``env.json``        where it ran: machine, versions, commit, service, links, clock error, seed
``requests.jsonl``  one `RequestRow` per request
``cells.jsonl``     one line per finished cell: its name, parameters, duration, and measured facts
``summary.json``    the figures
``report.html``     the report, with its pictures inside; the pictures are beside it as ``*.png``
================== ====================================================================================================

A cell (one combination of parameters) is finished as a whole: its line in ``cells.jsonl`` is written last. A run that
was interrupted keeps its finished cells, and repeats the others when it is resumed."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from pdserve.client.generation import Generation
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.request import Mode, counted
from pdserve.core.timeline import STAGE_NAMES, UNATTRIBUTED, Figure
from pdserve.version import VERSION

if TYPE_CHECKING:
    import pandas

Figures = dict[str, Any]
"""What a summary, one of its cells, or an arm has by name; plain values."""
Parameters = Mapping[str, Any]
"""What tells a cell from others."""
UNKNOWN_TOKEN = 2**32 - 1
"""Stands for each token of a server that returns no token ids."""
LAG = "lag"
"""The stage of `RequestRow.since_due` in which a request waits in the load generator."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a run: one line of ``requests.jsonl``. The schema is stable: fields may be added, and never change
    their meaning. ``pandas.read_json(path, lines=True)`` reads the file; see docs/experiments.md for examples.

    ``cell`` names the combination of parameters it belongs to, ``arm`` the side of the comparison, ``repeat`` and
    ``index`` its place there: rows of two arms with the same cell, kind, repeat, index and turn had the same prompt.
    ``kind`` is the part that the request plays in its arm, where requests of one arm play different parts.
    ``scheduled_s`` and ``sent_s`` count from the start of the cell; a difference means that the load generator was
    late. Latencies are the client's own, in milliseconds; ``stages_ms`` has the breakdown of each figure.
    ``others_cpu_s`` are the CPU seconds that processes which are not the measurement's used on this host meanwhile.
    ``token_hash`` identifies the generated tokens (empty: they are not known). A failed request has ``error`` (class
    and message) and neither latencies nor tokens."""

    cell: str
    arm: str
    repeat: int
    index: int
    turn: int = 0
    kind: str = ""
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    error: str | None = None
    request_id: str = ""
    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_hash: str = ""
    finish_reason: str = ""
    ttft_ms: float | None = None
    ttft_decode_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    stages_ms: Mapping[str, Mapping[str, float]] = {}
    clock_error_ms: float = 0.0
    transport: str = ""
    block_size: int = 0
    kv_bytes: int = 0
    kv_bytes_expected: int = 0
    kv_blocks_sent: int = 0
    kv_blocks_skipped: int = 0
    prefill_cached_tokens: int = 0
    transfer: Mapping[str, Any] = {}
    others_cpu_s: float | None = None

    @property
    def is_unproven(self) -> bool:
        """Whether its KV was moved by an engine that did not say how many bytes. (pdserve's own expects some, so that
        none are wrong.)"""
        moved = self.mode == Mode.PD and self.error is None and self.output_tokens > 1
        return moved and not (self.transport or self.kv_bytes_expected)

    @classmethod
    def of(cls, generation: Generation | None, error: PdserveError | None, **place: Any) -> RequestRow:
        """The row of a request that ended with ``generation`` or with ``error``; ``place`` has cell, arm, repeat, index
        and what else is known about it."""
        if generation is None:
            return cls(**place, error="" if error is None else f"{type(error).__name__}: {error}")
        alike = {name: getattr(generation, name) for name in cls.__struct_fields__ if hasattr(generation, name)}
        return cls(**{
            **alike,
            **place,
            "output_tokens": len(generation.token_ids),
            "token_hash": token_hash(generation.token_ids),
            "e2e_ms": generation.total_ms,
            "stages_ms": {figure: dict(breakdown.stages_ms) for figure, breakdown in generation.breakdowns.items()},
            "transfer": asdict(generation.transfer),
        })  # fmt: skip

    def figure_ms(self, figure: Figure) -> float | None:
        """The client's ``ttft`` or ``ttft_decode``."""
        return self.ttft_ms if figure is Figure.TTFT else self.ttft_decode_ms

    @property
    def token_times_s(self) -> NDArray[np.float64]:
        """When its tokens arrived, as ``sent_s``; none if that is not known."""
        known = self.ttft_ms is not None and self.error is None
        return self.sent_s + np.cumsum([self.ttft_ms, *self.itl_ms] if known else []) / 1e3

    def since_due(self) -> RequestRow:
        """The row with latencies that count from when the request was due, for loads whose arrivals do not depend on
        the service (open loop). What the load generator was late is part of them, and the stage `LAG` of their
        breakdowns: otherwise a generator that falls behind would hide queueing (coordinated omission)."""
        lag_ms = (self.sent_s - self.scheduled_s) * 1e3
        later = {
            name: value + lag_ms
            for name in ("ttft_ms", "ttft_decode_ms", "e2e_ms")
            if (value := getattr(self, name)) is not None
        }
        stages_ms = {figure: {LAG: lag_ms, **stages} for figure, stages in self.stages_ms.items()}
        return msgspec.structs.replace(self, sent_s=self.scheduled_s, stages_ms=stages_ms, **later)


def token_hash(token_ids: tuple[int, ...]) -> str:
    """A short digest of the generated tokens: equal exactly if the tokens are. Empty if one is `UNKNOWN_TOKEN`."""
    if UNKNOWN_TOKEN in token_ids:
        return ""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]


Rows = Sequence[RequestRow]


def values_of(rows: Iterable[RequestRow], field: str) -> list[Any]:
    """A field of the requests that succeeded and have it; of ``itl_ms`` all gaps."""
    found = [value for row in rows if row.error is None and (value := getattr(row, field)) is not None]
    return list(itertools.chain.from_iterable(found)) if field == "itl_ms" else found


def stages_of(rows: Iterable[RequestRow], figure: Figure = Figure.TTFT_DECODE) -> pandas.DataFrame:
    """The stages of a figure in the order of their table: a row per request that has it, and a column per stage that
    one of them has; nan for others."""
    import pandas  # takes long

    frame = pandas.DataFrame([row.stages_ms[figure] for row in rows if figure in row.stages_ms])
    return frame[[name for name in (LAG, *STAGE_NAMES, UNATTRIBUTED) if name in frame]]


def unexpected_bytes(rows: Iterable[RequestRow]) -> str | None:
    """What is wrong if a request moved other bytes than it had to, and the first that did; None if none did. Requests
    are compared one by one, because in a sum one that moved too much may hide one that moved too little."""
    wrong = [row for row in rows if row.kv_bytes != row.kv_bytes_expected]
    return (
        f"bytes moved differ from bytes expected in {counted(len(wrong), 'request')}, first in {wrong[0].request_id}: "
        f"{wrong[0].kv_bytes} instead of {wrong[0].kv_bytes_expected}"
        if wrong
        else None
    )


def failures(where: str, rows: Iterable[RequestRow]) -> list[str]:
    """``where: 2 requests failed, first with WorkerLost: gone``; empty if none of ``rows`` failed."""
    errors = [row.error for row in rows if row.error is not None]
    return [f"{where}: {counted(len(errors), 'request')} failed, first with {errors[0]}"] if errors else []


def faults(where: str, rows: Rows, *, failing: bool = True) -> list[str]:
    """What fails a run: requests that moved other bytes than they had to and, where none may fail, failed ones."""
    wrong = unexpected_bytes(rows)
    return [*([f"{where}: {wrong}"] if wrong else []), *(failures(where, rows) if failing else [])]


SCHEMA_VERSION = 1
"""Of the files of a run folder. It changes if a field gets another meaning, and not if fields are added."""
CONFIG, ENVIRONMENT, REQUESTS, CELLS, SUMMARY = (
    "config.yaml",
    "env.json",
    "requests.jsonl",
    "cells.jsonl",
    "summary.json",
)


SETTINGS = "config"
"""The fact of a cell that has its service's settings (`experiments.environment.settings`)."""
_OF_PREDICTIONS = {
    "engine": ("chunk_tokens", "max_num_batched_tokens"),
    "transfer": ("overlap", "layer_groups", "max_inflight_bytes"),
}


T = TypeVar("T")


class FinishedCell(msgspec.Struct, frozen=True):
    """One line of ``cells.jsonl``. ``facts`` are what was measured beside requests, such as the links in use."""

    cell: str
    parameters: dict[str, Any]
    duration_s: float
    facts: dict[str, Any]

    @property
    def config(self) -> PdserveConfig:
        """What predictions need of the service's configuration: how prompts are cut and when blocks are sent."""
        settings = self.facts.get(SETTINGS, {})
        return PdserveConfig.parse(
            {
                section: {key: settings[section][key] for key in keys if key in settings.get(section, {})}
                for section, keys in _OF_PREDICTIONS.items()
            }
        )


@dataclass(frozen=True, slots=True)
class RunData:
    """The raw data of a run: what summary and report are computed from."""

    name: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    cells: tuple[FinishedCell, ...]
    rows: tuple[RequestRow, ...]

    def rows_of(self, cell: str, arm: str | None = None) -> list[RequestRow]:
        """The rows of a cell, optionally of one arm."""
        return [row for row in self.rows if row.cell == cell and arm in (None, row.arm)]

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact that is the same of all cells that have it."""
        return next((cell.facts[name] for cell in self.cells if name in cell.facts), default)


def stamped(parent: Path) -> Path:
    """A new folder in ``parent``, named after the time; a second one of the same second gets ``-2`` at the end of its
    name. InvalidRequest if it cannot be made."""
    stamp, number = time.strftime("%Y-%m-%d-%H%M%S"), 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidRequest(f"output: {path} cannot be made: {error.strerror}") from None


class RunFolder:
    """The folder of a run that is being written or was written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, name: str, options: Mapping[str, Any]) -> Self:
        """A new folder ``root/name/stamp`` with the run's options. InvalidRequest if it cannot be written."""
        folder = cls(stamped(root / name))
        config = {"schema_version": SCHEMA_VERSION, "experiment": name, "options": dict(options)}
        folder._write(CONFIG, yaml.safe_dump(config, sort_keys=False))
        return folder

    @classmethod
    def open(cls, path: Path, option: str = "DIR") -> Self:
        """The folder of an earlier run: ``path``, or the only one that a command has written to its ``--output``
        ``path``. InvalidRequest, which names ``option``, if it is none."""
        if (path / CONFIG).is_file():
            return cls(path)
        runs = sorted(config.parent for config in path.glob(f"*/*/{CONFIG}"))
        if len(runs) == 1:
            return cls(runs[0])
        if runs:
            raise InvalidRequest(f"{option}: {path} has {len(runs)} runs; name one, such as {runs[-1]}")
        raise InvalidRequest(f"{option}: {path} is not the folder of a run: it has no {CONFIG}")

    @property
    def config(self) -> tuple[str, dict[str, Any]]:
        """The experiment's name and options. InvalidRequest if the file is damaged, or the folder has another schema
        than this version reads."""
        path = self.path / CONFIG
        try:
            loaded = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
            schema, name, options = loaded.get("schema_version"), str(loaded["experiment"]), dict(loaded["options"])
        except (OSError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"{path}: cannot be read: {error}") from None
        if schema != SCHEMA_VERSION:
            found = "is missing" if schema is None else f"is {schema!r}"
            raise InvalidRequest(
                f"{path}: schema_version: {found}, and pdserve {VERSION} reads {SCHEMA_VERSION}; use the version that "
                f"wrote the run ({ENVIRONMENT}: machine.pdserve)"
            )
        return name, options

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write ``env.json``."""
        self._write(ENVIRONMENT, json.dumps(environment, indent=1, allow_nan=False) + "\n")

    @property
    def environment(self) -> dict[str, Any]:
        """``env.json``; empty if it was not written yet."""
        return dict(self._read_json(ENVIRONMENT)) if (self.path / ENVIRONMENT).is_file() else {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write(SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")

    @property
    def summary(self) -> dict[str, Any]:
        """The figures. InvalidRequest if the run has none yet."""
        if not (self.path / SUMMARY).is_file():
            raise InvalidRequest(f"{self.path} has no {SUMMARY}: the run is not finished; go on with --resume")
        return dict(self._read_json(SUMMARY))

    def append(self, row: RequestRow) -> None:
        """Add a request. ValueError if a number is not finite, which msgspec by itself would write as null."""
        self._append(REQUESTS, row)

    def finish_cell(self, cell: FinishedCell) -> None:
        """Record that all rows of a cell are there."""
        self._append(CELLS, cell)

    def finished(self) -> set[str]:
        """Names of the finished cells."""
        return {cell.cell for cell in self._lines(CELLS, FinishedCell)}

    def drop_unfinished(self, spoiled: Collection[str] = ()) -> int:
        """Remove the rows of cells that did not finish, the cells whose names are in ``spoiled``, and lines that were
        cut off, before a run is resumed. Returns how many rows were removed."""
        rows = self._lines(REQUESTS, RequestRow)
        cells = [cell for cell in self._lines(CELLS, FinishedCell) if cell.cell not in spoiled]
        finished = {cell.cell for cell in cells}
        kept = [row for row in rows if row.cell in finished]
        self._write_lines(CELLS, cells)  # first: rows without their cell are those of an unfinished one
        self._write_lines(REQUESTS, kept)
        return len(rows) - len(kept)

    def arrange(self, names: Sequence[str]) -> None:
        """Put the finished cells into the order of ``names``; cells of other names come first."""
        places = {name: place for place, name in enumerate(names)}
        cells = sorted(self._lines(CELLS, FinishedCell), key=lambda cell: places.get(cell.cell, -1))
        self._write_lines(CELLS, cells)

    def load(self) -> RunData:
        """The raw data. InvalidRequest if a file is damaged."""
        name, options = self.config
        return RunData(
            name,
            options,
            self.environment,
            tuple(self._lines(CELLS, FinishedCell)),
            tuple(self._lines(REQUESTS, RequestRow)),
        )

    def _lines(self, name: str, kind: type[T]) -> list[T]:
        path = self.path / name
        if not path.is_file():
            return []
        found, lines = [], path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                found.append(msgspec.json.decode(line, type=kind))
            except msgspec.MsgspecError as error:
                if number == len(lines):
                    continue  # the process ended while it wrote this line
                raise InvalidRequest(f"{path}:{number}: {error}") from None
        return found

    def _read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{self.path / name}: cannot be read: {error}") from None

    def _append(self, name: str, value: msgspec.Struct) -> None:
        line = json.dumps(msgspec.to_builtins(value), allow_nan=False, separators=(",", ":"))
        with (self.path / name).open("ab") as file:
            file.write(line.encode() + b"\n")

    def _write(self, name: str, text: str) -> None:
        """Replace a file as a whole, so that an interrupted run has the old one or the new one."""
        temporary = self.path / f".{name}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    def _write_lines(self, name: str, lines: Sequence[msgspec.Struct]) -> None:
        self._write(name, "".join(msgspec.json.encode(line).decode() + "\n" for line in lines))
