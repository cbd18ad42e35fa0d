"""Shows how far an experiment is: bars on a terminal, otherwise one line per cell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from experiments.experiment import Cell


class RunProgress:
    """`experiments.runner.Progress` on a console, as a context manager around the run."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, disable=not console.is_terminal)
        self._cells: TaskID | None = None
        self._steps: TaskID | None = None
        self._total = self._done = 0
        self._started_s = time.monotonic()

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Show the number of cells, and the time that the loads of those to come last."""
        self._total, self._done = len(cells), finished
        self._cells = self._bars.add_task(self._name, total=len(cells), completed=finished)
        if finished:
            self._console.print(f"{self._name}: {finished} of {len(cells)} cells were measured before")
        sending_s = sum(cell.sending_s for cell in cells[finished:])
        if sending_s:
            self._console.print(
                f"{self._name}: {len(cells) - finished} cells; their loads alone take {sending_s / 60:.1f} min, and "
                "queues that empty and idle requests come on top"
            )

    def cell(self, cell: Cell) -> None:
        """Show the cell and its steps."""
        self._finish_cell()
        self._steps = self._bars.add_task(f"  {cell.name}", total=cell.work)
        if not self._console.is_terminal:
            elapsed_s = time.monotonic() - self._started_s
            self._console.print(f"{self._name} {self._done + 1}/{self._total} {cell.name}  ({elapsed_s:.0f} s)")
        self._done += 1

    def advance(self, steps: int) -> None:
        """Move the cell's bar."""
        if self._steps is not None:
            self._bars.advance(self._steps, steps)

    def stage(self, text: str) -> None:
        """Print what is going on."""
        self._console.print(f"  {text}", markup=False)

    def _finish_cell(self) -> None:
        if self._steps is not None and self._cells is not None:
            self._bars.remove_task(self._steps)
            self._bars.advance(self._cells)
            self._steps = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish_cell()
        self._bars.stop()
