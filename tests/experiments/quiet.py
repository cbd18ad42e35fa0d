"""A run of an experiment against a service, whose progress only counts; and what it found in data made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.experiment import Cell, Experiment, RunKind
from experiments.report.page import Report
from experiments.run_folder import RunData, RunFolder
from experiments.runner import redraw, run_experiment
from tests.local_cluster import local_cluster


class Quiet:
    """`experiments.runner.Progress` that remembers cells and stages, and counts the steps."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.steps = 0
        self.stages: list[str] = []

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Nothing to show."""

    def cell(self, cell: Cell) -> None:
        """Remember it."""
        self.cells.append(cell)

    def advance(self, steps: int) -> None:
        """Count them."""
        self.steps += steps

    def stage(self, text: str) -> None:
        """Remember it."""
        self.stages.append(text)


def measured(experiment: Experiment, root: Path, target: str | None = None) -> tuple[dict[str, Any], Path, Quiet]:
    """Run an experiment: its summary, its folder, and the progress. Nothing fails, it takes the steps that were
    planned, and drawing it again gives the same summary."""
    folder, progress = RunFolder.create(root, experiment.name, experiment.options.model_dump(mode="json")), Quiet()
    outcome = run_experiment(experiment, folder, progress, target=target)
    assert outcome.summary is not None
    assert not outcome.failures
    assert progress.steps == sum(cell.work for cell in progress.cells)
    assert redraw(experiment, folder) == outcome.summary
    return dict(outcome.summary), folder.path, progress


def measured_on_service(
    tmp_path: Path, kind: type[Experiment], given: Mapping[str, Any], settings: Mapping[str, Any], **cluster: Any
) -> tuple[RunFolder, dict[str, Any], list[str]]:
    """A run against a service with these settings: its folder, its summary, which can be computed again, and the names
    of its cells in order."""
    experiment, progress = kind(kind.options_type.choose(given)), Quiet()
    folder = RunFolder.create(tmp_path, kind.name, experiment.options.model_dump(mode="json"))
    with local_cluster(settings, **cluster) as service:
        outcome = run_experiment(experiment, folder, progress, target=service.target)
    assert outcome.failures == []
    assert not outcome.interrupted
    assert outcome.summary is not None
    assert redraw(experiment, folder) == outcome.summary
    return folder, dict(outcome.summary), [cell.name for cell in progress.cells]


def judged(kind: type[RunKind], run: RunData, **options: Any) -> tuple[dict[str, Any], Report]:
    """The summary and the report of a run with these options."""
    experiment = kind(kind.options_type.choose(options))
    summary = experiment.summarise(run)
    return summary, experiment.report(run, summary)


def holds(found: Any, expected: Mapping[str, Any], **tolerance: Any) -> None:
    """Assert what is at each dotted key, a float within a tolerance."""
    for key, value in expected.items():
        got = found
        for part in key.split("."):
            got = got[int(part) if isinstance(got, list) else part]
        assert got == (pytest.approx(value, **tolerance) if isinstance(value, float) else value), key


def told(texts: Sequence[str], *words: str) -> bool:
    """Whether each of ``words`` is in one of the texts."""
    return all(any(each in text for text in texts) for each in words)
