"""`pdserve experiment` and `pdserve report`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ops.cli.options import JsonOption


class _Experiments(TyperGroup):
    """The commands of `experiments.cli.experiment_commands`, imported when they are needed: an experiment imports Ray
    and numpy, which takes longer than most commands of `pdserve` run."""

    @functools.cached_property
    def _group(self) -> Any:  # typer does not publish the type of its groups
        from experiments.cli.experiment_commands import app as commands

        return typer.main.get_group(commands)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the experiments."""
        return list(self._group.list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of an experiment; None if there is none of this name."""
        return self._group.get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Experiments,
    no_args_is_help=True,
    help="Measure what disaggregation costs and when it pays; writes a report.",
)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a run")], as_json: JsonOption = False
) -> None:
    """Compute summary, pictures and report of a run again from its raw data. Needs no service."""
    from experiments.cli.experiment_commands import redraw_run

    redraw_run(folder, as_json)
