"""The commands of `pdserve experiment`, made from the options of each experiment. Imports everything an experiment
needs; `experiments.cli.commands` loads it when one of them is called."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

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
    access_of,
    print_json,
    print_note,
    progress,
    settings_of,
    stderr_console,
    stdout_console,
    target_option,
)
from ops.launch.detach import start_detached, stop_detached
from ops.launch.state import target_here
from pdserve.client.target import AccessOptions
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.request import counted
from pdserve.core.worker import Role

app = typer.Typer()

_KEEPS = "--{}: the running service of --target keeps its settings; leave one of the two out"

Given = dict[str, Any]
"""Options that a command got; None: not given."""


def _annotated(kind: Any, text: str, *flags: str) -> Any:
    return Annotated[kind, typer.Option(*flags, help=text)]


_COMMON: Mapping[str, tuple[Any, Any]] = {
    "target": (
        Annotated[
            str | None,
            target_option("measure this running service (port or host:port) instead of starting services", None),
        ],
        None,
    ),
    "prefill_url": (
        _annotated(list[str] | None, "measure this server of another engine as a prefill worker; repeatable"),
        None,
    ),
    "decode_url": (_annotated(list[str] | None, "the same as a decode worker; repeatable"), None),
    "output": (_annotated(Path, "folder in which NAME/STAMP is made for the run"), Path("results")),
    "resume": (_annotated(Path | None, "go on with the interrupted run in this folder, with its options"), None),
    "quick": (_annotated(bool, "fewer parameters and repeats: minutes on 2 cores", "--quick"), False),
    "config": (_annotated(Path | None, "configuration of the services that are started", "-c", "--config"), None),
    "set_": (
        _annotated(list[str] | None, "KEY=VALUE of their configuration, as engine.num_blocks=64", "--set"),
        None,
    ),
    "as_json": (_annotated(bool, "print the summary as one JSON object on one line", "--json"), False),
    **ACCESS_OPTIONS,
}


def _add(
    name: str,
    text: str,
    own: Mapping[str, tuple[Any, Any]],
    run: Callable[[Given, Given, AccessOptions], None],
    without: str = "",
    needs_own: str = "",
    starts_other_engines: bool = False,
) -> None:
    """Add ``pdserve experiment NAME`` with the options of all experiments, except ``without``, and its ``own``
    (annotation and default). ``run`` gets those of all and its own apart, after they were found not to contradict each
    other. It ends with exit code 1 if the run failed and 130 after Ctrl-C."""
    parameters = {**{key: each for key, each in _COMMON.items() if key != without}, **own}

    def command(**given: Any) -> None:
        common = {key: given.pop(key, default) for key, (_, default) in _COMMON.items()}
        kept = {**given, "target": common["target"], "quick": common["quick"] or None, "config": common["config"],
                "set": common["set_"]}  # fmt: skip
        clash = [key for key, value in kept.items() if value is not None]
        if common["resume"] is not None and clash:
            raise InvalidRequest(f"--{clash[0].replace('_', '-')}: a resumed run keeps its options; leave it out")
        settings = [key for key in ("config", "set") if kept[key]]
        if common["target"] is not None and settings:
            raise InvalidRequest(_KEEPS.format(settings[0]))
        with _with_other_engines(common, needs_own, starts_other_engines) as chosen:
            run(chosen, given, access_of(common))

    command.__annotations__ = {key: annotation for key, (annotation, _) in parameters.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for key, (annotation, default) in parameters.items()
        ]
    )
    app.command(name, help=text)(command)


@contextmanager
def _with_other_engines(common: Given, needs_own: str, starts_other_engines: bool) -> Iterator[Given]:
    """``common``, with the target of a service with other engines if they are wanted: one before the servers of
    ``--prefill-url`` and ``--decode-url``, or one with the engine that ``worker.engine`` names. It is started here, and
    ended afterwards, because these engines keep their options during all cells. An
    experiment that ``starts_other_engines`` starts its services itself. InvalidRequest for another one that
    ``needs_own`` services."""
    urls = {f"cluster.{role}_urls": common[f"{role}_url"] for role in Role if common[f"{role}_url"]}
    runs = [key for key in ("target", "resume") if common[key] is not None]
    if urls and runs:
        raise InvalidRequest(f"--{runs[0]}: servers are given by their URLs; leave one of the two out")
    settings = {"gateway.port": 0, "gateway.http_port": 0, **settings_of(common["set_"]), **urls}
    config = None if runs else PdserveConfig.load(common["config"], settings)
    if config is None or config.has_own_engines:
        yield common
        return
    if starts_other_engines:
        named = [f"{key}={json.dumps(servers)}" for key, servers in urls.items()]
        yield {**common, "set_": [*(common["set_"] or ()), *named]}
        return
    if needs_own:
        given = next((f"{role}-url" for role in Role if common[f"{role}_url"]), "set worker.engine")
        raise InvalidRequest(f"--{given}: {needs_own}; leave it out")
    console = stderr_console()
    with progress(console, "starting a service with other engines") as report:
        port = start_detached(config, report, partial(print_note, console))
    try:
        yield {**common, "target": target_here(config.gateway, port), "config": None, "set_": None}
    finally:
        stop_detached(port, 0.0)


def _run_one(
    kind: type[Experiment],
    choose: Callable[[Mapping[str, Any], bool], Options],
    common: Given,
    given: Given,
    access: AccessOptions,
) -> None:
    """Begin a run, or go on with one, whose options ``choose`` makes of those that were given."""
    if common["resume"] is None:
        refused = [key for key in kind.options_type.of_service if given.get(key)]
        if common["target"] is not None and refused:
            raise InvalidRequest(_KEEPS.format(min(refused).replace("_", "-")))
        if common["target"] is None and os.environ.get("PDSERVE_TARGET"):
            note = "PDSERVE_TARGET is set, and an experiment measures a running service only with --target"
            print_note(stderr_console(), note)
        experiment, service = kind(choose(given, common["quick"])), {key: common[key] for key in ("target", "config")}
        settings = settings_of(common["set_"])
        folder = new_folder(experiment, common["output"], access=access, settings=settings, **service)
    else:
        folder = RunFolder.open(common["resume"], "--resume")
        if (name := folder.config[0]) != kind.name:
            raise InvalidRequest(f"--resume: {common['resume']} is a run of {name}, not of {kind.name}")
        experiment = kind.of(folder)
    _, saved = folder.config
    config = Path(saved["config"]) if saved["config"] else None
    try:
        with RunProgress(stderr_console(), kind.name) as progress:
            outcome = run_experiment(
                experiment, folder, progress, target=saved["target"], access=access, config=config,
                settings=saved["settings"],
            )  # fmt: skip
    except PdserveError:
        if finished := folder.finished():
            print_note(
                stderr_console(),
                f"{counted(len(finished), 'finished cell')} kept; go on with: pdserve experiment {kind.name} "
                f"--resume {folder.path}, or draw them with: pdserve report {folder.path}",
            )
        raise
    _finish(kind.name, outcome, common["as_json"])


def _finish(name: str, outcome: Outcome, as_json: bool) -> None:
    page, console = outcome.folder.path / PAGE, stdout_console()
    if outcome.summary is not None:
        link_report(page)
        if as_json:
            print_json(outcome.summary)
        else:
            console.print(outcome.summary["answer"], markup=False)
            console.print(f"report  {page}", markup=False, soft_wrap=True)
    if outcome.interrupted:
        resume = f"pdserve experiment {name} --resume {outcome.folder.path}"
        stderr_console().print(f"interrupted; go on with: {resume}", soft_wrap=True)
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
    field, flag = kind.options_type.model_fields[name], name.replace("_", "-")
    quick = kind.options_type.quick_default(name)
    defaults = f"default: {_shown(field.default)}" + (f"; quick: {_shown(quick)}" if quick is not None else "")
    annotation: Any = field.annotation
    look: dict[str, Any] = {"help": f"{field.description} ({defaults})", "rich_help_panel": _panel(name)}
    if get_origin(annotation) is Literal:
        look |= {"help": f"{', '.join(get_args(annotation))}: {look['help']}", "metavar": "<choice>"}
    elif type(None) in get_args(annotation):
        annotation = get_args(annotation)[0]
    if annotation is bool:
        return Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", **look)]
    plain: Any = annotation if annotation in (int, float) else str
    return Annotated[plain | None, typer.Option(f"--{flag}", **look)]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple | list) else str(value)


def _run_all(common: Given, given: Given, access: AccessOptions) -> None:
    """Run experiments one after the other, or go on with that."""
    if common["resume"] is not None:
        series = Series.open(common["resume"])
    else:
        only, config = given["only"], common["config"]
        names = None if only is None else [part.strip() for part in only.split(",") if part.strip()]
        plan = SeriesPlan(
            Series.names(names), common["quick"], given["model"], common["target"], str(config) if config else None,
            settings_of(common["set_"]),
        )  # fmt: skip
        series = Series.create(common["output"], plan)
    console, states = stderr_console(), series.states
    interrupted = series.run(lambda name: RunProgress(console, name), access)
    if common["as_json"]:
        print_json({"folder": str(series.path), "experiments": states()})
    else:
        lines = [f"{state['name']}: {state['state']}" for state in states()]
        for line in (*lines, f"index  {series.path / 'index.html'}"):
            stdout_console().print(line, markup=False, soft_wrap=True)
    if interrupted:
        console.print(f"interrupted; go on with: pdserve experiment all --resume {series.path}", soft_wrap=True)
        raise typer.Exit(130)
    if any(state["state"] != FINISHED for state in states()):
        raise typer.Exit(1)


for each in EXPERIMENTS:
    options = {name: (_option(each, name), None) for name in each.options_type.model_fields}
    run = functools.partial(_run_one, each, each.options_type.choose)
    _add(
        each.name, each.question, options, run, needs_own=each.needs_own, starts_other_engines=each.starts_other_engines
    )
_FILE = Annotated[Path | None, typer.Argument(metavar="FILE", help="what to vary, see docs/experiments/sweep.md")]
_add(
    "sweep",
    f"{Sweep.question} The combinations are listed in a YAML file.",
    {"file": (_FILE, None)},
    functools.partial(_run_one, Sweep, lambda given, quick: SweepOptions.read(given["file"])),
    without="quick",
)
_add(
    "all",
    "Run all experiments one after the other, and write an index page that links their reports. An experiment that "
    "fails does not end the series. Exit code 1 if one failed, 130 after Ctrl-C.",
    {
        "only": (_annotated(str | None, "run these experiments only (names with commas)"), None),
        "model": (_annotated(str | None, "model of the services that are started"), None),
    },
    _run_all,
)
