"""Runs an experiment: its cells one after the other, each with the service it needs, and finally its report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Unpack

from experiments import environment
from experiments.deployment import Deployment, Service
from experiments.environment import BUSY, busy_texts
from experiments.experiment import Bench, Cell, Experiment, RunKind
from experiments.report.drawing import TableBlock, table
from experiments.report.page import Report
from experiments.run_folder import CONFIG, SETTINGS, Figures, FinishedCell, RunData, RunFolder
from experiments.warm_up import NOT_REACHED, not_reached_texts
from ops.machine_load import LOAD, MachineLoad, beside_cores, beside_text
from pdserve.client.status import ServiceStatus
from pdserve.client.target import Target
from pdserve.core.config import OTHER_ENGINES
from pdserve.core.errors import InvalidRequest
from pdserve.core.request import counted
from pdserve.core.worker import Role
from pdserve.version import VERSION

PLANNED = "planned_cells"
"""What ``env.json`` calls the number of cells that a complete run has."""
NOTES = "notes"
"""The fact of a cell: what its service has noted meanwhile."""
COUNTED = "prompts_counted"
"""The fact of a cell: decode's engine counts the prompts that it computes itself, and a note would tell of them."""
_LATE_NOTES_S = 1.5
"""The counters of other engines are read at each heartbeat, and tell this only while nothing runs."""


class Progress(Protocol):
    """Where a run shows how far it is."""

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """The run has these cells, of which the first ``finished`` were measured earlier."""

    def cell(self, cell: Cell) -> None:
        """A cell begins."""

    def advance(self, steps: int) -> None:
        """Steps of the cell are done."""

    def stage(self, text: str) -> None:
        """What is going on beside measuring, such as the start of a service."""


@dataclass(slots=True)
class Outcome:
    """What came of a run. ``interrupted``: Ctrl-C ended it before its last cell."""

    folder: RunFolder
    summary: Figures | None
    interrupted: bool
    failures: Sequence[str] = field(default_factory=list)


def run_experiment(
    experiment: Experiment,
    folder: RunFolder,
    progress: Progress,
    **service: Unpack[Service],
) -> Outcome:
    """Measure all cells that ``folder`` does not have yet, then write summary and report.
    Ctrl-C, SIGTERM and SIGHUP end the run in the middle of its cell; finished cells are kept and reported. A service
    that does not answer any more ends the run with NotReady; its cell is not finished."""
    interrupted = False
    with signals_interrupt(), _deployment(experiment, progress.stage, **service) as deployment:
        cells = _planned(experiment, deployment)
        finished = _resumed(cells, folder, progress)
        missing = [cell for cell in cells if cell.name not in finished]
        for name, value in experiment.fixed_options.items() if missing else ():
            if (earlier := folder.config[1].get(name, value)) != value:
                raise InvalidRequest(
                    f"{folder.path / CONFIG}: options.{name}: is {earlier!r}, and {value!r} in every run of pdserve "
                    f"{VERSION}; the run can be reported, but not resumed"
                )
        if finished and missing and folder.environment:
            _note_resumption(folder)
        folder.write_environment({**folder.environment, PLANNED: len(cells)})
        progress.begin(cells, len(cells) - len(missing))
        try:
            for cell in missing:
                _run_cell(experiment, cell, folder, deployment, progress)
        except KeyboardInterrupt:
            interrupted = True
            progress.stage("interrupted; finishing with what was measured")
    if not folder.finished():
        return Outcome(folder, None, interrupted)
    folder.arrange([cell.name for cell in cells])  # those that were measured again are last otherwise
    errors_ms = [row.clock_error_ms for row in folder.load().rows]
    folder.write_environment({**folder.environment, "clock_error_ms": max(errors_ms, default=0.0)})
    summary = redraw(experiment, folder)
    if not interrupted:
        experiment.finished(summary)
    return Outcome(folder, summary, interrupted, list(summary.get("failed", ())))


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Have SIGTERM and SIGHUP (a closed terminal) do what Ctrl-C does, so that no service is left behind. Only on the
    main thread. A SIGTERM or SIGHUP that is ignored (nohup) stays ignored; an ignored Ctrl-C, as of a program that a
    script has put in the background, makes no difference."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own for it

    usual = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in usual.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def new_folder(
    experiment: Experiment,
    root: Path,
    **service: Unpack[Service],
) -> RunFolder:
    """The folder of a new run in ``root``; its ``config.yaml`` has all that `run_experiment` is to be called with.
    Checks first whether the options can work, and raises what is wrong with them before anything is written."""
    with _deployment(experiment, lambda stage: None, **service) as deployment:
        _planned(experiment, deployment)
    config, settings = service.get("config"), dict(service.get("settings") or {})
    where = {"target": service.get("target"), "config": None if config is None else str(config), "settings": settings}
    # What a running service does not take would be no fact about the run.
    hidden = experiment.options_type.of_service if where["target"] else frozenset()
    options = experiment.options.model_dump(mode="json", exclude=set(hidden))
    return RunFolder.create(root, experiment.name, {**options, **where})


def _deployment(experiment: Experiment, report: Callable[[str], None], **service: Unpack[Service]) -> Deployment:
    service["settings"] = {"model.path": experiment.options.model, **(service.get("settings") or {})}
    return experiment.deployment(report, **service)


def _planned(experiment: Experiment, deployment: Deployment) -> list[Cell]:
    """The cells, after checking that options and settings can work."""
    if deployment.attached and experiment.needs_own:
        raise InvalidRequest(f"--target: {experiment.needs_own}; leave it out")
    cells = experiment.cells(deployment.status())
    if len({cell.name for cell in cells}) != len(cells):
        raise InvalidRequest("two cells of the experiment have the same parameters; give each value once")
    for cell in cells:
        if cell.service is not None and not deployment.attached:
            deployment.configuration(cell.service)
    return cells


def _resumed(cells: Sequence[Cell], folder: RunFolder, progress: Progress) -> set[str]:
    """Names of the cells that need no measuring. Removes from ``folder`` what an earlier part of the run did not
    finish, and finished cells with requests that failed by accident."""
    planned = {cell.name: cell for cell in cells}
    spoiled = {row.cell for row in folder.load().rows if row.cell in planned and planned[row.cell].spoiled_by(row)}
    finished = folder.finished()
    if repeated := [name for name in planned if name in spoiled & finished]:
        progress.stage(f"measured again, as requests had failed: {', '.join(repeated)}")
    folder.drop_unfinished(spoiled)
    return finished - spoiled


def redraw(kind: RunKind, folder: RunFolder) -> dict[str, Any]:
    """Compute the summary and draw the report from the raw data of ``folder``, without a service. Beside the figures
    the summary has the ``answer`` and the ``caveats`` of the report."""
    run = folder.load()
    figures = kind.summarise(run)
    report: Report = kind.report(run, figures)
    report.caveats = [*report.caveats, *_measuring_caveats(run), *_resumption_caveats(run)]
    beside = {cell.cell: text for cell in run.cells if (text := beside_text(cell.facts))}
    _tell_load(run, report, beside)
    if beside and not any(text in report.answer for text in beside.values()):
        most = max((cell.facts for cell in run.cells), key=beside_cores)
        cells = f"{len(beside)} of {counted(len(run.cells), 'cell')}"
        report.answer = f"Measured {beside_text(most)} (in {cells}). {report.answer}"
    if (planned := run.environment.get(PLANNED, 0)) > len(run.cells):
        report.answer = f"Interrupted: {len(run.cells)} of {planned} cells were measured. {report.answer}"
    summary = {**figures, "answer": report.answer, "caveats": list(report.caveats)}
    folder.write_summary(summary)
    footer = (
        f"{environment.version_text(run.environment.get('machine', {}))}; {folder.path.name}; "
        f"raw data: requests.jsonl, cells.jsonl, env.json, config.yaml beside this page"
    )
    report.save(folder.path, footer)
    return summary


def _run_cell(
    experiment: Experiment, cell: Cell, folder: RunFolder, deployment: Deployment, progress: Progress
) -> None:
    facts: dict[str, Any] = {}
    target: str | Target = ""
    status: ServiceStatus | None = None
    if cell.service is not None:
        target = deployment.provide(cell.service)
        status = deployment.status()
        assert status is not None
        facts["links"] = environment.links(status)
        facts[SETTINGS] = environment.settings(status)
        _note_environment(experiment, folder, status)
    else:
        deployment.stop()  # a cell without a service measures the machine alone
        _note_environment(experiment, folder, None)
    attached = Target.of(target) if deployment.attached else None
    meter = MachineLoad.begin(attached)
    progress.cell(cell)
    earlier = {each.cell: each.facts for each in folder.load().cells}
    bench = Bench(
        cell,
        target,
        folder.append,
        progress.advance,
        tell=progress.stage,
        attached=deployment.attached,
        earlier=earlier,
    )
    begun_s = time.monotonic()
    bench.run(experiment.measure)
    duration_s = round(time.monotonic() - begun_s, 3)
    if not experiment.simulated:
        facts |= meter.facts()
    if status is not None:
        if any(worker.device in OTHER_ENGINES for worker in status.workers):
            time.sleep(_LATE_NOTES_S)
        # Raises if the service has ended: requests that failed by that are no result; --resume repeats the cell.
        facts[NOTES] = [note for note in deployment.notes() if note not in status.notes]
        facts[COUNTED] = {worker.device for worker in status.workers if worker.role == Role.DECODE} == {"vllm"}
    folder.finish_cell(FinishedCell(cell.name, dict(cell.parameters), duration_s, {**facts, **bench.facts}))


def _note_environment(experiment: Experiment, folder: RunFolder, status: ServiceStatus | None) -> None:
    """Write ``env.json`` with the first service; later cells may change it, and record their links themselves."""
    known = folder.environment
    if known.get("service") is None:
        folder.write_environment(
            {
                **known,
                "machine": known.get("machine") or environment.machine(),
                "service": None if status is None else environment.service(status),
                "seed": experiment.options.seed,
                "started": known.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )


def _note_resumption(folder: RunFolder) -> None:
    """Add to ``env.json`` in what this part of the run differs from its beginning: the machine, or versions."""
    known, machine = folder.environment, environment.machine()
    parts = [known["machine"], *(part["machine"] for part in known.get("resumed", ()))]
    if machine != parts[-1]:
        part = {"machine": machine, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        folder.write_environment({**known, "resumed": [*known.get("resumed", ()), part]})


def _measuring_caveats(run: RunData) -> list[str]:
    """What disturbed the measurement of the cells: requests of others, workers that no warm-up reached, and what the
    service has noted, such as prompts that decode computed itself."""
    return [
        f"{cell.cell}: {text}"
        for cell in run.cells
        for text in (
            *busy_texts(cell.facts.get(BUSY, ())),
            *not_reached_texts(cell.facts.get(NOT_REACHED, ())),
            *cell.facts.get(NOTES, ()),
        )
    ]


def _tell_load(run: RunData, report: Report, beside: Mapping[str, str]) -> None:
    """Add a table of the machine's load beside the cells, and name it where other tables have one of the cells that
    were measured ``beside`` other load."""
    for place, block in enumerate(report.blocks):
        if isinstance(block, TableBlock):
            named = [(f"{row[0]} ({beside[row[0]]})" if row[0] in beside else row[0], *row[1:]) for row in block.rows]
            report.blocks[place] = replace(block, rows=named)
    loads = [{"cell": cell.cell, **load} for cell in run.cells if (load := cell.facts.get(LOAD))]
    if loads:
        columns = (
            "cell",
            "cores of this host | cores",
            "used by others before the cell | before_cores:.2f",
            "used by others during it | during_cores:.2f",
        )
        caption = "Cores that processes used which are not the measurement's. –: which are the service's is not known."
        report.blocks.append(table("Load of the machine", loads, columns, caption))


def _resumption_caveats(run: RunData) -> list[str]:
    parts = [run.environment.get("machine", {}), *(part["machine"] for part in run.environment.get("resumed", ()))]
    if len(parts) == 1:
        return []
    states = "; then ".join(f"{part.get('host', '?')}, {environment.version_text(part)}" for part in parts)
    return [f"The run was resumed in another state of the machine or of the code: {states}. Its cells are from both."]
