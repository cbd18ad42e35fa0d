"""Shows how far an experiment is: bars on a terminal, otherwise one line per cell. Links its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from experiments.experiment import Cell
from experiments.report.drawing import TableBlock
from ops.cli.options import plain_table, print_note, stderr_console
from ops.launch.state import note_report
from pdserve.core.errors import LaunchError
from pdserve.core.request import counted

_CELL_S = 10.0
"""What a cell takes beside its ``sending_s`` before any was measured: the start of a service, and warm-up."""


class RunProgress:
    """`experiments.runner.Progress` on a console, as a context manager around the run."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, disable=not console.is_terminal)
        self._tasks: list[TaskID] = []
        self._cells: Sequence[Cell] = ()
        self._done = self._first = 0
        self._started_s = time.monotonic()

    def begin(self, cells: Sequence[Cell], finished: int) -> None:
        """Show the number of cells, and the time that the loads and pairs of those to come last at most."""
        self._cells, self._done, self._first = cells, finished, finished
        self._tasks = [self._bars.add_task(self._name, total=len(cells), completed=finished)]
        if finished:
            self._console.print(f"{self._name}: {finished} of {counted(len(cells), 'cell')} measured before")
        if sending_s := sum(cell.sending_s for cell in cells[finished:]):
            self._console.print(
                f"{self._name}: {counted(len(cells) - finished, 'cell')}; loads and pairs take up to "
                f"{sending_s / 60:.1f} min; starts of services, warm-up and queues that empty come on top"
            )

    def cell(self, cell: Cell) -> None:
        """Show the cell and its steps, and from the second one on the time that is left, which follows from the cells
        so far."""
        self._finish_cell()
        self._tasks.append(self._bars.add_task(f"  {cell.name}", total=cell.work))
        elapsed_s, left = time.monotonic() - self._started_s, ""
        weight_s, to_come_s = (
            sum(each.sending_s + _CELL_S for each in cells)
            for cells in (self._cells[self._first : self._done], self._cells[self._done :])
        )
        if weight_s:
            left_s = elapsed_s / weight_s * to_come_s
            left = f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"
        self._bars.update(self._tasks[0], description=f"{self._name}{left}")
        self._done += 1
        if not self._console.is_terminal:
            place = f"{self._name} {self._done}/{len(self._cells)} {cell.name}"
            self._console.print(f"{place}  ({elapsed_s:.0f} s{left})")

    def advance(self, steps: int) -> None:
        """Move the cell's bar."""
        self._bars.advance(self._tasks[-1], steps)

    def stage(self, text: str) -> None:
        """Print what is going on."""
        self._console.print(f"  {text}", markup=False)

    def _finish_cell(self) -> None:
        if len(self._tasks) > 1:
            self._bars.remove_task(self._tasks.pop())
            self._bars.advance(self._tasks[0])

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish_cell()
        self._bars.stop()


def link_report(page: Path) -> None:
    """Let the live page of this user's services link a report. A note says why, where that is not possible."""
    try:
        note_report(page)
    except LaunchError as error:
        print_note(stderr_console(), f"the live page does not link this report: {error}")


def printed(block: TableBlock, left: int = 1) -> Table:
    """A table of a report on the console, whose first ``left`` columns are text."""
    shown = plain_table(block.header[:left], block.header[left:])
    for row in block.rows:
        shown.add_row(*row)
    return shown
