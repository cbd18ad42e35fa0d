"""What a run leaves behind when it, or the service that it measures, is ended."""

from __future__ import annotations

import asyncio
import html
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments import deployment, environment
from experiments.deployment import Deployment
from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.report.page import Report
from experiments.run_folder import FinishedCell, RequestRow, RunData, RunFolder
from experiments.runner import redraw, run_experiment
from pdserve import AsyncClient, Client
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import CapacityExceeded, LaunchError, NotReady, PdserveError, PeerLost, WorkerLost
from pdserve.core.worker import Role
from tests.experiments.quiet import Quiet
from tests.local_cluster import LocalCluster, free_port, local_cluster
from tests.pdserve.scripted_service import ScriptedService


class Scripted(Experiment):
    """Has a cell of each service that is given, and measures it by calling a function. Those from ``loads_from`` on may
    overload their service."""

    name: ClassVar[str] = "scripted"
    question: ClassVar[str] = "What happens?"
    options_type: ClassVar[type[Options]] = Options

    def __init__(self, *cells: tuple[Mapping[str, Any] | None, Callable[[Bench], None]], loads_from: int = 99) -> None:
        super().__init__(Options())
        self._cells, self._loads_from = cells, loads_from

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        return [
            Cell(str(number), {}, service, may_overload=number >= self._loads_from)
            for number, (service, _) in enumerate(self._cells)
        ]

    async def measure(self, bench: Bench) -> None:
        self._cells[int(bench.cell.name)][1](bench)
        await asyncio.sleep(0.01)

    def summarise(self, run: RunData) -> dict[str, Any]:
        return {"cells": [cell.cell for cell in run.cells]}

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        return Report("", "", "")


def test_a_resumed_run_repeats_cells_with_requests_that_failed_by_accident(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "scripted", {})
    measured: list[str] = []

    def record(*errors: PdserveError | None) -> Scripted:
        """Each cell has a request, which fails with its error."""

        def request(bench: Bench) -> None:
            name = bench.cell.name
            measured.append(name)
            if (error := errors[int(name)]) is not None:
                bench.record(None, error, arm="pd", repeat=0, index=0)
            else:
                bench.write(RequestRow(cell=name, arm="pd", repeat=0, index=0))

        return Scripted(*[(None, request)] * 4, loads_from=2)

    refused = CapacityExceeded("the queue is full")
    run_experiment(record(WorkerLost("gone"), None, refused, PeerLost("gone")), folder, Quiet())
    measured.clear()
    progress = Quiet()
    outcome = run_experiment(record(*[None] * 4), folder, progress)
    assert measured == ["0", "3"]  # refusals under load are a result
    assert "measured again, as requests had failed: 0, 3" in progress.stages
    assert outcome.summary is not None
    assert outcome.summary["cells"] == ["0", "1", "2", "3"]
    assert [row.cell for row in folder.load().rows if row.error is not None] == ["2"]
    assert len(folder.load().rows) == 4
    run_experiment(record(*[None] * 4), folder, Quiet())
    assert measured == ["0", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prefix", "--set", "engine.blocks=3"), "engine.blocks: unknown key"),
        (("prefix", "--target", "{service}", "--prompt-len", "5000"), "--prompt-len: "),
        (("goodput", "--rates", "1,1"), "--rates: a rate is given twice"),
    ],
)
def test_a_wrong_option_leaves_no_folder(
    tmp_path: Path, pdserve: Any, service: ScriptedService, arguments: tuple[str, ...], message: str
) -> None:
    given = [each.format(service=service.target) for each in arguments]
    ran = pdserve("experiment", *given, "--output", str(tmp_path))
    assert ran.code == 2
    assert message in ran.err
    assert not list(tmp_path.iterdir())


class Disturbed(Scripted):
    """Measures while a request of another client decodes."""

    async def measure(self, bench: Bench) -> None:
        async with AsyncClient(bench.target) as client, AsyncClient(bench.target) as other:
            stream = other.generate([1] * 16, max_tokens=1500, ignore_eos=True)
            await anext(stream)
            await bench.settle(client, "pairs", timeout_s=1.0)
            await stream.aclose()
            await bench.settle(client, "the end")


def test_what_is_measured_beside_requests_of_others_has_a_caveat(tmp_path: Path, tcp_service: LocalCluster) -> None:
    folder, progress = RunFolder.create(tmp_path, "scripted", {}), Quiet()
    outcome = run_experiment(Disturbed(({}, nothing)), folder, progress, target=tcp_service.target)
    text = "pairs began on a busy service beside requests that were not the measurement's (1 running, 0 queued)"
    assert outcome.summary is not None
    # Other tests may share its cores, which is a caveat, too.
    (caveat,) = [each for each in outcome.summary["caveats"] if "cores" not in each]
    assert caveat.startswith(f"0: {text}")
    assert folder.summary["caveats"] == outcome.summary["caveats"]
    assert text in html.unescape((folder.path / "report.html").read_text())
    assert [stage for stage in progress.stages if stage.startswith(text)]


def test_every_pair_of_workers_has_to_be_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster({"transfer": {"transport": "tcp"}}) as cluster:
        attached = Deployment(cluster.target)
        status = attached.status()
        assert status is not None
        assert [link.worker_id for worker in status.workers for link in worker.links] == ["decode-0"]
        cluster.start_worker(Role.DECODE, 1, transfer={"transport": "grpc_stream"})  # prefill-0 cannot reach it
        with Client(cluster.target) as client:
            deadline_s = time.monotonic() + 60
            while all(worker.worker_id != "decode-1" for worker in client.status().workers):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        monkeypatch.setattr(deployment, "_LINK_TIMEOUT_S", 1.0)
        with pytest.raises(NotReady, match="has no link between prefill-0 and decode-1 after 1 s"):
            attached.status()


def nothing(bench: Bench) -> None:
    """Measure nothing."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_keeps_what_was_measured(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    before = signal.default_int_handler
    usual = signal.signal(number, before)  # nohup has SIGHUP ignored
    request.addfinalizer(lambda: signal.signal(number, usual))
    experiment = Scripted((None, nothing), (None, lambda bench: signal.raise_signal(number)))
    outcome = run_experiment(experiment, RunFolder.create(tmp_path, "scripted", {}), Quiet())
    assert outcome.interrupted
    assert outcome.summary is not None
    assert outcome.summary["answer"].startswith("Interrupted: ")
    assert outcome.summary is not None
    assert outcome.summary["cells"] == ["0"]
    assert signal.getsignal(number) is before


def test_a_cell_whose_service_ended_is_not_finished(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "scripted", {})
    with local_cluster({}) as cluster:
        experiment = Scripted(({}, nothing), ({}, lambda bench: cluster.close()))
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
    assert not Deployment().notes()
    with pytest.raises(NotReady):
        Deployment(f"localhost:{free_port()}").notes()


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


def test_a_running_service_keeps_its_settings(tmp_path: Path, pdserve: Any) -> None:
    for option, value in (("--config", "x.yaml"), ("--set", "engine.num_blocks=64")):
        for command in (("prefix",), ("all", "--only", "prefix")):
            ran = pdserve("experiment", *command, "--target", "localhost:1", "--output", str(tmp_path), option, value)
            assert ran.code == 2
            assert f"{option}: the running service of --target keeps its settings" in ran.err
    for option, value in (("--model", "tiny"), ("--transports", "shm,tcp"), ("--widths", "mha")):
        ran = pdserve("experiment", "added-ttft", "--target", "localhost:1", "--output", str(tmp_path), option, value)
        assert ran.code == 2
        assert f"{option}: the running service of --target keeps its settings" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_only_the_environment_names_is_not_measured_without_a_word(
    tmp_path: Path, pdserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_TARGET", "localhost:1")
    ran = pdserve("experiment", "primer", "--output", str(tmp_path), "--model", "missing/model")
    assert "PDSERVE_TARGET is set, and an experiment measures a running service only with --target" in ran.err


def test_an_error_says_how_to_go_on(tmp_path: Path, pdserve: Any) -> None:
    with local_cluster({}) as cluster:
        given = ("--target", cluster.target, "--output", str(tmp_path))
        ran = pdserve("experiment", "added-ttft", "--prompt-lens", "16,100000", *given)
        assert ran.code == 2
        assert "--prompt-lens: prompts of 100000 tokens do not fit, the service takes up to " in ran.err
        cells = ("--prompt-lens", "16", "--rates", "", "--widths", "", "--pairs", "1", "--pairs-s", "0")
        ran = pdserve("experiment", "added-ttft", *cells, *given)
        assert ran.code == 0
    (folder,) = (tmp_path / "added-ttft").iterdir()
    ran = pdserve("experiment", "added-ttft", "--resume", str(folder))
    assert ran.code == 1
    assert f"go on with: pdserve experiment added-ttft --resume {folder}" in ran.err


def test_a_headline_names_other_load_in_any_question(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "scripted", {})
    for name, cores in (("0", 0.0), ("1", 1.3), ("2", 0.4)):
        load = {"cores": 2, "before_cores": 0.1, "during_cores": cores}
        folder.finish_cell(FinishedCell(name, {}, 1.0, {"machine_load": load}))
    answer = redraw(Scripted(), folder)["answer"]
    assert answer.startswith("Measured beside other load: 1.3 of 2 cores (in 2 of 3 cells). ")
