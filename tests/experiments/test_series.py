"""`pdserve experiment all`: failures, interruption, and what is on the index page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments import series
from experiments.experiment import Bench, Cell, Experiment, Options
from experiments.report.page import Report
from experiments.run_folder import RequestRow, RunData
from experiments.series import Series, SeriesPlan
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import WorkerLost
from tests.experiments.quiet import Quiet


class Counting(Experiment):
    """Measures its two cells without a service."""

    name: ClassVar[str] = "counting"
    question: ClassVar[str] = "How many cells are there?"
    options_type: ClassVar[type[Options]] = Options
    problem: ClassVar[BaseException | None] = None
    measured: ClassVar[list[str]] = []
    drawn: ClassVar[list[str]] = []

    def cells(self, attached: ServiceStatus | None) -> list[Cell]:
        return [Cell("a", {}, None), Cell("b", {}, None)]

    async def measure(self, bench: Bench) -> None:
        if bench.cell.name == "b" and self.problem is not None:
            raise self.problem
        self.measured.append(f"{self.name}/{bench.cell.name}")
        bench.write(RequestRow(cell=bench.cell.name, arm="x", repeat=0, index=0))

    def summarise(self, run: RunData) -> dict[str, Any]:
        return {"cells": len(run.cells), "failed": ["it is wrong"] if self.name == "wrong" else []}

    def report(self, run: RunData, summary: Mapping[str, Any]) -> Report:
        self.drawn.append(self.name)
        return Report(self.name, self.question, f"There are {summary['cells']} cells.")


class Wrong(Counting):
    """Fails with its result."""

    name: ClassVar[str] = "wrong"


class Breaking(Counting):
    """Fails while it measures."""

    name: ClassVar[str] = "breaking"
    problem: ClassVar[BaseException | None] = WorkerLost("it is gone")


class Stopped(Counting):
    """Gets Ctrl-C in its second cell."""

    name: ClassVar[str] = "stopped"
    problem: ClassVar[BaseException | None] = KeyboardInterrupt()


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.name: kind for kind in (Wrong, Breaking, Stopped, Counting)}
    monkeypatch.setattr(series, "experiment_of", kinds.__getitem__)
    monkeypatch.setattr(series, "EXPERIMENTS", tuple(kinds.values()))
    monkeypatch.setattr(Counting, "measured", [])
    monkeypatch.setattr(Counting, "drawn", [])


def states(each: Series) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in each.states()}


def test_a_series_goes_on_after_failures_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = Series.create(tmp_path, SeriesPlan(Series.names(None)))
    assert all_of_them.run(lambda name: nullcontext(Quiet()))
    assert states(all_of_them) == {
        "wrong": "failed: it is wrong",
        "breaking": "failed: it is gone",
        "stopped": "interrupted",
        "counting": "not measured yet",
    }
    assert Counting.drawn == ["wrong", "stopped"]  # once each
    page = (all_of_them.path / "index.html").read_text()
    assert "There are 2 cells." in page
    assert "There are 1 cells." in page  # what was measured before Ctrl-C
    assert "failed: it is gone" in page

    monkeypatch.setattr(Stopped, "problem", None)
    monkeypatch.setattr(Breaking, "problem", None)
    monkeypatch.setattr(Counting, "measured", [])
    again = Series.open(all_of_them.path)
    assert not again.run(lambda name: nullcontext(Quiet()))
    assert Counting.measured == ["breaking/b", "stopped/b", "counting/a", "counting/b"]  # nothing twice
    assert states(again) == {"wrong": "failed: it is wrong", "breaking": "finished", "stopped": "finished",
                             "counting": "finished"}  # fmt: skip
    page = (again.path / "index.html").read_text()
    for entry in again.states():
        assert f'href="{entry["folder"]}/report.html"' in page
        assert (again.path / entry["folder"] / "report.html").is_file()


def test_the_plan_is_kept(tmp_path: Path) -> None:
    plan = SeriesPlan(["counting"], quick=True, model="tiny", settings={"engine.num_blocks": 64})
    made = Series.create(tmp_path, plan)
    assert not made.run(lambda name: nullcontext(Quiet()))
    assert json.loads((made.path / "series.json").read_text())["plan"]["model"] == "tiny"
    (entry,) = made.states()
    assert "model: tiny" in (made.path / entry["folder"] / "config.yaml").read_text()


def test_the_command(tmp_path: Path, pdserve: Any) -> None:
    ran = pdserve("experiment", "all", "--resume", str(tmp_path))
    assert ran.code == 2
    assert "is not the folder of a series" in ran.err
    ran = pdserve("experiment", "all", "--resume", str(tmp_path), "--quick")
    assert "--quick: a resumed run keeps its options" in ran.err
    assert "--only: is empty" in pdserve("experiment", "all", "--only", ",").err
