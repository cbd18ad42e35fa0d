"""`pdserve compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ops.cli.options import JsonOption, plain_table, print_json, print_note, stderr_console, stdout_console


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
    everything: Annotated[bool, typer.Option("--all", help="show figures that are equal in both runs as well")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the figures of two runs (of an experiment, or of bench --output) side by side.

    Figures of rows are means over the requests of a cell, arm and kind, with a 95 % interval of the difference. * marks
    a difference whose interval leaves 0 out. A larger time is worse; of goodput, throughput, savings and shares a
    smaller value is."""
    from experiments import compare as comparing
    from experiments.run_folder import RunFolder

    limits = [comparing.Limit.parse(text) for text in limit or ()]
    a, b = RunFolder.open(first, "A"), RunFolder.open(second, "B")
    found = comparing.compare(a, b)
    options = a.config[1], b.config[1]
    for key in sorted(options[0].keys() & options[1].keys()):
        if options[0][key] != options[1][key]:
            print_note(stderr_console(), f"the runs differ in {key}: {options[0][key]} and {options[1][key]}")
    arms = comparing.arms_of(a), comparing.arms_of(b)
    if comparing.common_arm(a, b):
        print_note(stderr_console(), f"arm {arms[1][0]} of B is compared with arm {arms[0][0]} of A")
    elif arms[0] != arms[1]:
        both = ", ".join(name for name in arms[0] if name in arms[1]) or "none"
        print_note(stderr_console(), f"arms of A: {', '.join(arms[0])}; of B: {', '.join(arms[1])}; compared: {both}")
    lacking = comparing.missing(a, b)
    for name, other in (("B", "A"), ("A", "B")):
        if keys := [each.key for each in lacking if each.of == name]:
            print_note(stderr_console(), f"figures of {other} that {name} lacks: {len(keys)}, such as {keys[0]}")
    for name, folder in (("A", a), ("B", b)):
        for failure in folder.summary.get("failed", ()):
            print_note(stderr_console(), f"{name} failed: {failure}")
    broken = comparing.violations([*found, *lacking], limits)
    if as_json:
        print_json(
            {
                "a": str(first),
                "b": str(second),
                "figures": [each.to_dict() for each in found],
                "missing": [{"key": each.key, "run": each.of} for each in lacking],
                "violations": [{"key": each.key, "limit_percent": which.percent} for each, which in broken],
            }
        )
    else:
        table = plain_table(("figure",), ("A", "B", "B - A", "%", "95 % of B - A", ""))
        for each in found:
            if everything or each.difference:
                interval = each.interval
                table.add_row(
                    each.key,
                    f"{each.a:.4g}",
                    f"{each.b:.4g}",
                    f"{each.difference:+.4g}",
                    "–" if each.percent is None else f"{each.percent:+.1f}",
                    "–" if interval is None else f"[{interval.lo:.4g}, {interval.hi:.4g}]",
                    "*" if each.distinct else "",
                )
        console = stdout_console()
        console.print(table if table.row_count else f"all {len(found)} figures are equal")
    for broke, which in broken:
        if isinstance(broke, comparing.Missing):
            text = f"[red]missing[/]: {broke.key} has a limit of {which.percent:g} %, and {broke.of} lacks it"
        else:
            values = f"{broke.a:.4g} became {broke.b:.4g}"
            text = f"[red]worse[/]: {broke.key}: {values}, beyond the limit of {which.percent:g} %"
        stderr_console().print(text, soft_wrap=True)
    if broken:
        raise typer.Exit(1)
