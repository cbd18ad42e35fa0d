"""Options, tables, and progress output shared by the commands."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.client.target import AccessOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pdserve.core.config import PdserveConfig

TOKEN_VARIABLE = "PDSERVE_TOKEN"
_UNBOUNDED = 10_000
_PIPE_WIDTH = 120  # a pipe has no width; rich would assume 80 columns and wrap wide tables

CONNECTION = "Connection"
"""The panel of help for the options that say where a service is and how to reach it."""
_TARGET = "port on this host, host:port or URL of the service; https:// means TLS"


def target_option(help_text: str, variable: str | None = "PDSERVE_TARGET") -> Any:
    """The option that says which service a command is about: ``--target`` or ``--port``. The ``variable`` of the
    environment may give it instead."""
    return typer.Option("--target", "--port", help=help_text, envvar=variable, rich_help_panel=CONNECTION)


TargetOption = Annotated[str, target_option(_TARGET)]
TargetsOption = Annotated[str, target_option(f"{_TARGET}; several gateways with commas between")]
HereOption = Annotated[str, target_option("gRPC port, or host:port, of the service on this host (see `pdserve list`)")]

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on one line instead")]

_ConfigOption = Annotated[Path | None, typer.Option("-c", "--config", help="configuration (see `pdserve config`)")]
_SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the configuration; repeatable")
]
_SERVICE_OPTIONS: Mapping[str, tuple[str, Any, str]] = {
    "model": ("model.path", str, "folder, or org/name on the hub"),
    "prefill": ("cluster.prefill", int, "prefill workers"),
    "decode": ("cluster.decode", int, "decode workers"),
    "prefill_url": ("cluster.prefill_urls", list[str], "running prefill server; repeatable"),
    "decode_url": ("cluster.decode_urls", list[str], "running decode server; repeatable"),
    "device": ("cluster.device", str, "auto, cpu or cuda"),
    "oversubscribe": ("cluster.oversubscribe", bool, "let workers share device slots"),
    "placement": ("cluster.placement", str, "pack, spread or strict_spread"),
    "nodes": ("cluster.nodes", int, "wait for so many nodes of a joined Ray"),
    "host": ("gateway.host", str, "address to listen on; 0.0.0.0: all"),
    "port": ("gateway.port", int, "port of the gRPC API; 0: a free one"),
    "gateways": ("gateway.replicas", int, "gateways, on --port and those after it"),
    "insecure": ("gateway.insecure", bool, "let others call without TLS or tokens"),
    "address": ("cluster.address", str, "local: own Ray; auto, host:port: join"),
}
"""Options of `up` and `doctor`: the key of the configuration that each one overrides, its type, and its help. Rarer
keys are set with ``--set``."""


def settings_of(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The ``KEY=VALUE`` of ``--set``, whose values are YAML; InvalidRequest names one that is wrong."""
    import yaml

    from pdserve.core.errors import InvalidRequest

    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(f"--set: {pair!r} is not KEY=VALUE, such as engine.num_blocks=64")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InvalidRequest(f"--set: the value of {pair!r} is not valid YAML") from None
    return settings


def with_service_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--config``, ``--set`` and `_SERVICE_OPTIONS` in the place of its parameter ``settings``, which
    becomes the resulting configuration."""
    options: dict[str, tuple[Any, Any]] = {"config": (_ConfigOption, None), "set_": (_SetOption, None)}
    for name, (_, kind, text) in _SERVICE_OPTIONS.items():
        flag = Annotated[bool, typer.Option(f"--{name}", help=text)], False
        options[name] = flag if kind is bool else (Annotated[kind | None, typer.Option(help=text)], None)
    return _replaced(command, "settings", options, _settings)


def _settings(given: dict[str, Any]) -> PdserveConfig:
    from pdserve.core.config import PdserveConfig

    chosen = {key: given[name] for name, (key, _, _) in _SERVICE_OPTIONS.items()}
    overrides = {
        key: value for key, value in chosen.items() if value is not None and value is not False and value != []
    }
    return PdserveConfig.load(given["config"], {**settings_of(given["set_"]), **overrides})


def _access(name: str, kind: Any, text: str) -> Any:
    variable = f"PDSERVE_{name.upper()}"
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, envvar=variable, rich_help_panel=CONNECTION)
    return Annotated[kind, option]


ACCESS_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "ca": (_access("ca", Path | None, "certificates of those who sign the service's, for https://"), None),
    "cert": (_access("cert", Path | None, "own certificate, for services that ask for one"), None),
    "key": (_access("key", Path | None, "its private key"), None),
    "token_file": (
        _access("token_file", Path | None, f"file with the bearer token (default: {TOKEN_VARIABLE})"),
        None,
    ),
    "token_in_clear": (_access("token_in_clear", bool, "send the token to another host without TLS"), False),
}
"""Options of all commands that are clients of a service: annotation and default. Each may be given by the environment
instead, in ``PDSERVE_`` and its name."""


def with_options(
    parameter: str, options: Mapping[str, tuple[Any, str]], panel: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``options`` (type and help by name; none has a default) in the place of its ``parameter``, which
    becomes a dictionary of them. Help shows them in a panel of their own."""
    declared = {
        name: (Annotated[kind | None, typer.Option(help=text, rich_help_panel=panel)], None)
        for name, (kind, text) in options.items()
    }
    return lambda command: _replaced(command, parameter, declared, dict)


def with_access(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `ACCESS_OPTIONS` in the place of its parameter ``access``, which becomes what they say."""
    return _replaced(command, "access", ACCESS_OPTIONS, access_of)


def _replaced(
    command: Callable[..., None],
    parameter: str,
    options: Mapping[str, tuple[Any, Any]],
    value_of: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """``command`` with ``options`` (annotations and defaults by name) in the place of a parameter."""

    def run(**given: Any) -> None:
        value = value_of({name: given.pop(name) for name in options})
        command(**{parameter: value}, **given)

    signature = inspect.signature(command, eval_str=True, locals={"PdserveConfig": Any})  # which is imported later
    own = [each for each in signature.parameters.values() if each.name != parameter]
    added = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return run


def access_of(given: Mapping[str, Any]) -> AccessOptions:
    """What `ACCESS_OPTIONS` and the environment say. ConfigError if there is no token in the file."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if (path := given["token_file"]) is not None:
        from pdserve.core.errors import ConfigError

        try:
            token = path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise ConfigError(f"--token-file: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            token = ""
        if not token:
            raise ConfigError(f"--token-file: {path} has no token")
    return AccessOptions(
        ca=given["ca"],
        cert=given["cert"],
        key=given["key"],
        token=token,
        token_in_clear=given["token_in_clear"],
    )


def stdout_console() -> Console:
    """The console for a command's result."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """The console for progress and remarks, so that stdout holds the result only."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def print_json(value: Mapping[str, Any]) -> None:
    """Print ``value`` as one line of JSON."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_note(console: Console, text: str) -> None:
    """Print something that users have to know about their service."""
    from rich.markup import escape

    console.print("[yellow]note[/]:", escape(text), soft_wrap=True)


@contextmanager
def progress(console: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner; gives a function that prints a stage and shows it beside the spinner."""
    with console.status(doing) as status:

        def report(stage: str) -> None:
            console.print(f"  {stage}")
            status.update(stage)

        yield report


def fitted(
    console: Console,
    rows: Sequence[Mapping[str, str]],
    left: Sequence[str],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
    wrapped: Sequence[str] = (),
) -> Table:
    """A `plain_table` of ``rows``, whose values are by column, that fits the console: columns of ``optional`` are left
    out one after the other, the first one first. Those of ``wrapped`` come last, and break their lines."""
    for count in range(len(optional) + 1):
        texts, numbers, last = ([n for n in names if n not in optional[:count]] for names in (left, right, wrapped))
        table = plain_table(texts, numbers)
        for name in last:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(row.get(str(column.header), "") for column in table.columns))
        if console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum <= console.width:
            break
    return table


STATE_COLORS = {
    "ready": "green",
    "awaited": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "stopping": "yellow",
}


def colored(state: str, shown: str = "") -> str:
    """A state, or what is ``shown`` of it, in its color."""
    return f"[{STATE_COLORS.get(state, 'red')}]{shown or state}[/]"


def plain_table(left: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """A table without lines whose ``left`` columns hold text and whose ``right`` columns hold numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table
