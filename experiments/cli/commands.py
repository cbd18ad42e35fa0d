"""The commands of the laboratory, which `ops.cli.main` adds to ``pdserve``."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.cli import bench
from ops.cli.options import JsonOption, print_json, print_note, stderr_console, stdout_console
from pdserve.core.errors import InvalidRequest


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="folder of the run to compare with")],
    second: Annotated[Path, typer.Argument(metavar="B", help="folder of another run of the same experiment")],
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=PERCENT: exit code 1 if a figure of this key got worse by more, beyond its interval, or if one "
            "of the runs lacks it; the end of a key or a pattern, such as ttft_ms=5 (repeatable)"
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="show the other figures as well")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell in what two runs (of an experiment, or of bench --output) differ: first in a sentence, then the figures that
    changed beyond the 95 % interval of the difference or have a limit.

    Figures of rows are means over the requests of a cell, arm and kind. * marks a difference whose interval leaves 0
    out. A larger time is worse; of goodput, throughput, savings and shares a smaller value is."""
    from experiments import compare as comparing
    from experiments.cli.progress import printed
    from experiments.report.drawing import table
    from experiments.run_folder import RunFolder

    limits = [comparing.Limit.parse(text) for text in limit or ()]
    a, b = RunFolder.open(first, "A"), RunFolder.open(second, "B")
    found, lacking = comparing.compare(a, b)
    options, arms = (a.config[1], b.config[1]), (comparing.arms_of(a), comparing.arms_of(b))
    notes = [
        f"the runs differ in {key}: {options[0][key]} and {options[1][key]}"
        for key in sorted(options[0].keys() & options[1].keys())
        if options[0][key] != options[1][key]
    ]
    differing = comparing.differences(a, b)
    for each in differing:
        where = f" (in {len(each.cells)} cells, such as {each.cells[0]})" if len(each.cells) > 1 else ""
        values = " and ".join("unset" if value is None else str(value) for value in (each.a, each.b))
        notes.append(f"the runs differ in {each.key}: {values}{where}")
    if comparing.common_arm(a, b):
        notes.append(f"arm {arms[1][0]} of B is compared with arm {arms[0][0]} of A")
    elif arms[0] != arms[1]:
        both = ", ".join(name for name in arms[0] if name in arms[1]) or "none"
        notes.append(f"arms of A: {', '.join(arms[0])}; of B: {', '.join(arms[1])}; compared: {both}")
    for name, other in (("B", "A"), ("A", "B")):
        if keys := [each.key for each in lacking if each.of == name]:
            notes.append(f"figures of {other} that {name} lacks: {len(keys)}, such as {keys[0]}")
    notes += [f"{name} failed: {text}" for name, run in (("A", a), ("B", b)) for text in run.summary.get("failed", ())]
    for note in notes:
        print_note(stderr_console(), note)
    broken = comparing.violations([*found, *lacking], limits)
    verdict = comparing.verdict(a, b, found)
    if as_json:
        print_json(
            {
                "verdict": verdict,
                "differences": [asdict(each) for each in differing],
                "a": str(first),
                "b": str(second),
                "figures": [each.to_dict() for each in found],
                "missing": [{"key": each.key, "run": each.of} for each in lacking],
                "violations": [{"key": each.key, "limit_percent": which.percent} for each, which in broken],
            }
        )
    else:
        shown = [
            {**each.to_dict(), "mark": "*" if each.distinct else ""}
            for each in found
            if everything or each.distinct or any(limit.covers(each.key) for limit in limits)
        ]
        console = stdout_console()
        console.print(verdict, markup=False, soft_wrap=True)
        if shown:
            figures = "figure | key", "A | a:.4g", "B | b:.4g", "B - A | difference:+.4g", "% | percent:+.1f"
            edges = "95 % of B - A | interval.lo:.4g, interval.hi:.4g"
            console.print(printed(table("", shown, (*figures, edges, " | mark"))))
        if len(shown) < len(found):
            console.print(f"{len(found) - len(shown)} other figures: --all")
    for broke, which in broken:
        text = (
            f"[red]missing[/]: {broke.key} has a limit of {which.percent:g} %, and {broke.of} lacks it"
            if isinstance(broke, comparing.Missing)
            else f"[red]worse[/]: {broke.key}: {broke.a:.4g} became {broke.b:.4g}, beyond the limit of "
            f"{which.percent:g} %"
        )
        stderr_console().print(text, soft_wrap=True)
    if broken:
        raise typer.Exit(1)


_FORMATS = ("png", "svg", "pdf", "csv")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")],
    formats: Annotated[str, typer.Option("--format", help="png, svg, pdf, csv (several with commas)")] = "png",
    output: Annotated[Path, typer.Option(help="folder for the pictures; it is made")] = Path("plots"),
) -> None:
    """Draw runs into one set of pictures: exposed transfer over prompt length, goodput over rate, and the distributions
    of the stages, as far as the runs have the data. Needs no service.

    csv writes the data of each picture. Several runs share the pictures, named by their folders."""
    from experiments.catalogue import run_of
    from experiments.overview import Source, pictures
    from experiments.run_folder import RunFolder

    chosen = [part.strip() for part in formats.split(",") if part.strip()]
    unknown = [each for each in chosen if each not in _FORMATS]
    if unknown or not chosen:
        raise InvalidRequest(f"format: {(unknown or [''])[0]!r} is none of {', '.join(_FORMATS)}")
    folders = [RunFolder.open(path, "RUN") for path in runs]
    sources = []
    for folder in folders:
        data = folder.load()
        label = f"{data.name}/{folder.path.resolve().name}" if len(folders) > 1 else ""
        sources.append(Source(label, data, run_of(folder).summarise(data)))
    found = pictures(sources)
    if not found:
        raise InvalidRequest("RUN: the runs have nothing to draw: no request was recorded with a breakdown")
    output.mkdir(parents=True, exist_ok=True)
    console = stdout_console()
    for picture in found:
        for kind_of_file in chosen:
            path = output / f"{picture.stem}.{kind_of_file}"
            if kind_of_file == "csv":
                picture.frame().to_csv(path, index=False)
            else:
                path.write_bytes(picture.file(kind_of_file))
            console.print(str(path), markup=False, soft_wrap=True)


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


experiments = typer.Typer(
    cls=_Experiments,
    no_args_is_help=True,
    help="Measure what disaggregation costs and when it pays; writes a report.",
)


_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True}


def plan(context: typer.Context) -> None:
    """Simulate deployments, and say which serves most requests within an SLO (pdserve experiment plan)."""
    experiments_command: Any = typer.main.get_group(experiments)
    experiments_command.main(["plan", *context.args], prog_name="pdserve", standalone_mode=False)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a run")], as_json: JsonOption = False
) -> None:
    """Compute summary, pictures and report of a run again from its raw data. Needs no service."""
    from experiments.cli.experiment_commands import redraw_run

    redraw_run(folder, as_json)


def add_commands(app: typer.Typer) -> None:
    """The entry point ``pdserve.commands`` of this package."""
    app.command("bench", context_settings=bench.CONTEXT)(bench.bench)
    app.add_typer(experiments, name="experiment")
    app.command("plan", context_settings={**_FORWARDED, "help_option_names": []})(plan)
    for command in (report, compare, plot):
        app.command(command.__name__)(command)
