"""The commands of the laboratory, which `ops.cli.main` adds to ``pdserve``."""

from __future__ import annotations

import typer

from experiments.cli import bench, compare, experiment, plot


def add_commands(app: typer.Typer) -> None:
    """The entry point ``pdserve.commands`` of this package."""
    app.command("bench", context_settings=bench.MORE_ARGUMENTS)(bench.bench)
    app.add_typer(experiment.app, name="experiment")
    app.command("report")(experiment.report)
    app.command("compare")(compare.compare)
    app.command("plot")(plot.plot)
