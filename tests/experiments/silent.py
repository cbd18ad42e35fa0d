"""Progress that shows nothing, for runs of experiments in tests."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.experiment import Cell


class Silent:
    """See the module. ``cells`` are the names of those that began."""

    def __init__(self) -> None:
        self.cells: list[str] = []

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Nothing."""

    def cell(self, cell: Cell) -> None:
        """Note its name."""
        self.cells.append(cell.name)

    def advance(self, steps: int) -> None:
        """Nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""
