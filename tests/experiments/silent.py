"""Progress of a run that shows nothing."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.experiment import Cell


class Silent:
    """Progress that shows nothing."""

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Nothing."""

    def cell(self, cell: Cell) -> None:
        """Nothing."""

    def advance(self, steps: int) -> None:
        """Nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""
