"""A progress of an experiment that only counts."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.experiment import Cell


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
