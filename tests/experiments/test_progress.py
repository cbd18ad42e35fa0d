"""What a run shows of its progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from experiments.cli.progress import RunProgress
from experiments.experiment import Cell


@pytest.mark.parametrize(("finished", "words"), [(0, "3 cells; their loads alone take 2.0 min"), (2, "1 cells; ")])
def test_the_planned_time_of_the_loads_is_printed(finished: int, words: str) -> None:
    output = io.StringIO()
    cells = [Cell("idle", {}), Cell("rate-1", {}, sending_s=30.0), Cell("rate-2", {}, sending_s=90.0)]
    RunProgress(Console(file=output, width=200), "added-ttft").begin(cells, finished)
    assert words in output.getvalue()


def test_without_loads_no_time_is_planned() -> None:
    output = io.StringIO()
    RunProgress(Console(file=output, width=200), "primer").begin([Cell("a", {})], 0)
    assert output.getvalue() == ""
