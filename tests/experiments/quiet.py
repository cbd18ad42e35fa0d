"""A run of an experiment against a service, whose progress only counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import Cell, Experiment
from experiments.run_folder import RunFolder
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
