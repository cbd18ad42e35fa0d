"""The commands of `pdserve experiment`, made from the options of each experiment. Imports everything an experiment
needs; `experiments.cli.commands` loads it when one of them is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from experiments.catalogue import EXPERIMENTS, run_of
from experiments.cli.progress import RunProgress, link_report
from experiments.experiment import Experiment, Options
from experiments.report.page import PAGE
from experiments.run_folder import RunFolder
from experiments.runner import Outcome, new_folder, redraw, run_experiment
from experiments.series import FINISHED, Series, SeriesPlan
from experiments.sweep import Sweep, SweepOptions
from ops.cli.options import (
    ACCESS_OPTIONS,
    CONNECTION,
    access_of,
    print_json,
    print_note,
    settings_of,
    stderr_console,
    stdout_console,
    with_access,
)
from pdserve.client.target import AccessOptions
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.request import counted

app = typer.Typer()

DEFAULT_OUTPUT = Path("results")

_Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="measure this running service (host:port) instead of starting services",
        rich_help_panel=CONNECTION,
    ),
]
_Output = Annotated[Path, typer.Option("--output", help="folder in which NAME/STAMP is made for the run")]
_Resume = Annotated[
    Path | None, typer.Option("--resume", help="go on with the interrupted run in this folder, with its options")
]
_Quick = Annotated[bool, typer.Option("--quick", help="fewer parameters and repeats: minutes on 2 cores")]
_Config = Annotated[Path | None, typer.Option("-c", "--config", help="configuration of the services that are started")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of their configuration, as engine.num_blocks=64")
]
_Json = Annotated[bool, typer.Option("--json", help="print the summary as one JSON object on one line")]
_COMMON = {
    "target": (_Target, None),
    "output": (_Output, DEFAULT_OUTPUT),
    "resume": (_Resume, None),
    "quick": (_Quick, False),
    "config": (_Config, None),
    "set_": (_Set, None),
    "as_json": (_Json, False),
    **ACCESS_OPTIONS,
}


def _no_options_with_resume(given: Mapping[str, Any]) -> None:
    clash = [name for name, value in given.items() if value is not None]
    if clash:
        raise InvalidRequest(f"--{clash[0].replace('_', '-')}: a resumed run keeps its options; leave it out")


def _no_settings_with_target(target: str | None, config: Path | None, set_: Sequence[str] | None) -> None:
    if target is not None and (config is not None or set_):
        option = "--config" if config is not None else "--set"
        raise InvalidRequest(f"{option}: the running service of --target keeps its settings; leave one of the two out")


def _resumed(kind: type[Experiment], common: Mapping[str, Any], given: Mapping[str, Any]) -> RunFolder:
    shared = {"target": common["target"], "config": common["config"], "set": common["set_"]}
    _no_options_with_resume({**given, **shared, "quick": common.get("quick") or None})
    folder = RunFolder.open(common["resume"], "--resume")
    name, _ = folder.config
    if name != kind.name:
        raise InvalidRequest(f"--resume: {common['resume']} is a run of {name}, not of {kind.name}")
    return folder


def _measure(experiment: Experiment, folder: RunFolder, access: AccessOptions, as_json: bool) -> None:
    _, saved = folder.config
    try:
        with RunProgress(stderr_console(), experiment.name) as progress:
            outcome = run_experiment(
                experiment,
                folder,
                progress,
                target=saved["target"],
                access=access,
                config=Path(saved["config"]) if saved["config"] else None,
                settings=saved["settings"],
            )
    except PdserveError:
        if finished := folder.finished():
            print_note(
                stderr_console(),
                f"{counted(len(finished), 'finished cell')} kept; go on with: pdserve experiment {experiment.name} "
                f"--resume {folder.path}, or draw them with: pdserve report {folder.path}",
            )
        raise
    _finish(experiment.name, outcome, as_json)


def _finish(name: str, outcome: Outcome, as_json: bool) -> None:
    folder = outcome.folder
    console = stdout_console()
    if outcome.summary is not None:
        link_report(folder.path / PAGE)
        if as_json:
            print_json(outcome.summary)
        else:
            console.print(outcome.summary["answer"], markup=False)
            console.print(f"report  {folder.path / PAGE}", markup=False, soft_wrap=True)
    if outcome.interrupted:
        stderr_console().print(
            f"interrupted; go on with: pdserve experiment {name} --resume {folder.path}", soft_wrap=True
        )
        raise typer.Exit(130)
    for failure in outcome.failures:
        stderr_console().print(f"[red]failed[/]: {failure}")
    if outcome.failures:
        raise typer.Exit(1)


def redraw_run(folder: Path, as_json: bool) -> None:
    """Compute and draw a run again; ends with exit code 1 if it had failed."""
    run = RunFolder.open(folder)
    kind = run_of(run)
    summary = redraw(kind, run)
    _finish(kind.name, Outcome(run, summary, False, list(summary.get("failed", ()))), as_json)


def _command(
    kind: type[Experiment], own: Mapping[str, tuple[Any, Any]], choose: Callable[[Mapping[str, Any], bool], Options]
) -> Callable[..., None]:
    """The function behind ``pdserve experiment NAME``, with its ``own`` parameters (annotation and default), from which
    ``choose`` makes options. It ends with exit code 1 if the run failed and 130 after Ctrl-C."""
    parameters = {**{name: each for name, each in _COMMON.items() if name != "quick" or kind is not Sweep}, **own}

    def run(**given: Any) -> None:
        common = {name: given.pop(name) for name in _COMMON.keys() & parameters.keys()}
        access, service = access_of(common), {name: common[name] for name in ("target", "config")}
        if common["resume"] is not None:
            folder = _resumed(kind, common, given)
            experiment = kind.of(folder)
        else:
            _no_settings_with_target(common["target"], common["config"], common["set_"])
            experiment, settings = kind(choose(given, common.get("quick", False))), settings_of(common["set_"])
            folder = new_folder(experiment, common["output"], access=access, settings=settings, **service)
        _measure(experiment, folder, access, common["as_json"])

    run.__name__, run.__doc__ = kind.name, kind.question
    run.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in parameters.items()
        ]
    )
    return run


_PANELS = {
    "Load": "load rate rates slo duration rounds requests arrive decoding backlog turns pause scale",
    "Data": "model seed dataset trace prompt prefix prefixes len lens median contexts context widths",
}
"""Words in the names of an experiment's options, by the panel of help in which those stand."""


def _panel(name: str) -> str:
    words = set(name.split("_"))
    return next((panel for panel, known in _PANELS.items() if words & set(known.split())), "Settings and repetition")


def _option(kind: type[Experiment], name: str) -> Any:
    """The typer annotation of an option: numbers are checked by typer, everything else by the experiment's options."""
    field = kind.options_type.model_fields[name]
    quick = kind.options_type.quick_default(name)
    defaults = f"default: {_shown(field.default)}" + (f"; quick: {_shown(quick)}" if quick is not None else "")
    text = f"{field.description} ({defaults})"
    annotation = field.annotation
    if get_origin(annotation) is Union or str(get_origin(annotation)) == "<class 'types.UnionType'>":
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    plain = annotation if annotation in (int, float) else str
    flags = f"--{name.replace('_', '-')}"
    look: dict[str, Any] = {"help": text, "rich_help_panel": _panel(name)}
    if annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flags}/--no-{name.replace('_', '-')}", **look)]
    if get_origin(annotation) is Literal:
        look |= {"help": f"{', '.join(get_args(annotation))}: {text}", "metavar": "<choice>"}
    return Annotated[plain | None, typer.Option(flags, **look)]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple | list) else str(value)


for each in EXPERIMENTS:
    options = {name: (_option(each, name), None) for name in each.options_type.model_fields}
    app.command(each.name, help=each.question)(_command(each, options, each.options_type.choose))
_FILE = Annotated[Path | None, typer.Argument(metavar="FILE", help="what to vary, see docs/experiments/sweep.md")]
app.command("sweep", help=f"{Sweep.question} The combinations are listed in a YAML file.")(
    _command(Sweep, {"file": (_FILE, None)}, lambda given, quick: SweepOptions.read(given["file"]))
)


@app.command("all")
@with_access
def run_all(
    access: AccessOptions,
    only: Annotated[str | None, typer.Option(help="run these experiments only (names with commas)")] = None,
    target: _Target = None,
    output: _Output = DEFAULT_OUTPUT,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="go on with the interrupted series in this folder")
    ] = None,
    quick: _Quick = False,
    model: Annotated[str | None, typer.Option(help="model of the services that are started")] = None,
    config: _Config = None,
    set_: _Set = None,
    as_json: _Json = False,
) -> None:
    """Run all experiments one after the other, and write an index page that links their reports.

    An experiment that fails does not end the series. Exit code 1 if one failed, 130 after Ctrl-C."""
    if resume is not None:
        given = {"only": only, "target": target, "quick": quick or None, "model": model, "config": config, "set": set_}
        _no_options_with_resume(given)
        series = Series.open(resume)
    else:
        _no_settings_with_target(target, config, set_)
        names = None if only is None else [part.strip() for part in only.split(",") if part.strip()]
        plan = SeriesPlan(Series.names(names), quick, model, target, str(config) if config else None, settings_of(set_))
        series = Series.create(output, plan)
    console = stderr_console()
    interrupted = series.run(lambda name: RunProgress(console, name), access)
    if as_json:
        print_json({"folder": str(series.path), "experiments": series.states()})
    else:
        out = stdout_console()
        for state in series.states():
            out.print(f"{state['name']}: {state['state']}", markup=False, soft_wrap=True)
        out.print(f"index  {series.path / 'index.html'}", markup=False, soft_wrap=True)
    if interrupted:
        console.print(f"interrupted; go on with: pdserve experiment all --resume {series.path}", soft_wrap=True)
        raise typer.Exit(130)
    if any(state["state"] != FINISHED for state in series.states()):
        raise typer.Exit(1)
