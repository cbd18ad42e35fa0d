"""What a run leaves behind when it, or the service that it measures, is ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments import deployment, environment
from experiments.deployment import Deployment
from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.report.page import Report
from experiments.run_folder import RunData, RunFolder
from experiments.runner import run_experiment
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import LaunchError, NotReady
from tests.experiments.quiet import Quiet
from tests.local_cluster import free_port, local_cluster


class Scripted(Experiment):
    """Has a cell of each service that is given, and measures it by calling a function."""

    name: ClassVar[str] = "scripted"
    question: ClassVar[str] = "What happens?"
    options_type: ClassVar[type[Options]] = Options

    def __init__(self, *cells: tuple[Mapping[str, Any] | None, Callable[[], None]]) -> None:
        super().__init__(Options())
        self._cells = {str(number): cell for number, cell in enumerate(cells)}

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        return [Cell(name, {}, service) for name, (service, _) in self._cells.items()]

    async def measure(self, bench: Bench) -> None:
        self._cells[bench.cell.name][1]()
        await asyncio.sleep(0.01)

    def summarise(self, run: RunData) -> dict[str, Any]:
        return {"cells": [cell.cell for cell in run.cells]}

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        return Report("", "", "")


def nothing() -> None:
    """Measure nothing."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    experiment = Scripted((None, nothing), (None, lambda: signal.raise_signal(number)))
    outcome = run_experiment(experiment, RunFolder.create(tmp_path, "scripted", {}), Quiet())
    assert outcome.interrupted
    assert outcome.summary == {"cells": ["0"]}
    assert signal.getsignal(number) is before


def test_a_cell_whose_service_ended_is_not_finished(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "scripted", {})
    with local_cluster({}) as cluster:
        experiment = Scripted(({}, nothing), ({}, cluster.close))
        with pytest.raises(NotReady):
            run_experiment(experiment, folder, Quiet(), target=cluster.target)
    assert folder.finished() == {"0"}


def test_a_run_that_is_resumed_with_other_code_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(commit: str, cells: int) -> None:
        monkeypatch.setattr(environment, "_commit", lambda: commit)
        run_experiment(Scripted(*[(None, nothing)] * cells), folder, Quiet())

    folder = RunFolder.create(tmp_path, "scripted", {})
    run("one", cells=1)
    run("two", cells=1)  # nothing left to measure
    run("one", cells=2)
    assert "resumed" not in folder.environment
    run("two", cells=3)
    run("two", cells=4)
    assert folder.environment["machine"]["commit"] == "one"
    assert [part["machine"]["commit"] for part in folder.environment["resumed"]] == ["two"]
    page = (folder.path / "report.html").read_text()
    assert "commit one; then" in page
    assert "commit two" in page


def test_no_service_is_not_checked() -> None:
    Deployment().check()
    with pytest.raises(NotReady):
        Deployment(f"localhost:{free_port()}").check()


class Services:
    """In place of real services: the ports of those that run. ``problems`` are raised by the next stops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *problems: BaseException) -> None:
        self.running: list[int] = []
        self._problems = list(problems)
        monkeypatch.setattr(deployment, "start_detached", self._start)
        monkeypatch.setattr(deployment, "stop_detached", self._stop)

    def _start(self, config: object) -> int:
        self.running.append(50051)
        return 50051

    def _stop(self, port: int, drain_s: float) -> None:
        if self._problems:
            raise self._problems.pop(0)
        self.running.remove(port)


def test_ctrl_c_while_a_service_ends_does_not_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, KeyboardInterrupt())
    chosen = Deployment()
    chosen.provide({})
    assert services.running == [50051]
    with pytest.raises(KeyboardInterrupt):
        chosen.__exit__(None, None, None)
    assert services.running == []


def test_ctrl_c_while_services_change_does_not_leave_one(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services(monkeypatch, KeyboardInterrupt())
    with Deployment() as chosen:
        chosen.provide({})
        with pytest.raises(KeyboardInterrupt):
            chosen.provide({"engine.num_blocks": 64})
    assert services.running == []


def test_a_service_that_ended_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Services(monkeypatch, LaunchError("it has already ended"))
    told: list[str] = []
    with Deployment(report=told.append) as chosen:
        chosen.provide({})
    assert told[-1] == "it has already ended"


def test_resuming_refuses_options_of_a_new_run(tmp_path: Path, pdserve: Any) -> None:
    for option, value in (("--target", "localhost:1"), ("--config", "x.yaml"), ("--set", "a=1"), ("--seed", "3")):
        for name in ("prefix", "sweep") if option != "--seed" else ("prefix",):
            ran = pdserve("experiment", name, "--resume", str(tmp_path), option, value)
            assert ran.code == 2
            assert f"{option}: a resumed run keeps its options" in ran.err


def test_an_error_says_how_to_go_on(tmp_path: Path, pdserve: Any) -> None:
    with local_cluster({}) as cluster:
        target = cluster.target
        arguments = ("--prompt-lens", "16,100000", "--rates", "", "--widths", "", "--pairs", "1")
        assert pdserve("experiment", "added-ttft", "--target", target, "--output", str(tmp_path), *arguments).code == 0
    (folder,) = (tmp_path / "added-ttft").iterdir()
    ran = pdserve("experiment", "added-ttft", "--resume", str(folder))
    assert ran.code == 1
    assert f"go on with: pdserve experiment added-ttft --resume {folder}" in ran.err
