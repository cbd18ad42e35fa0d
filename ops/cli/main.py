"""The command line: one file per command, and those that packages add (entry points ``pdserve.commands``). Expensive
imports happen inside the commands."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from ops.cli import chat, config, demo, doctor, generate, logs, model_info, simulate, status, up
from pdserve.core import plugins
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.version import VERSION


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pdserve {VERSION}")
        raise typer.Exit


app = typer.Typer(
    name="pdserve",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback()
def pdserve(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Serve an LLM on Ray with prefill and decode on separate workers, and see the hand-off's cost per request."""


app.command("up")(up.up)
app.command("down")(up.down)
app.command("scale")(up.scale)
app.command("list")(up.list_services)
app.command("logs")(logs.logs)
app.command("status")(status.status)
app.command("top")(status.top)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("model-info")(model_info.model_info)
app.command("config")(config.config)
app.add_typer(config.token_app, name="token")
app.command("doctor")(doctor.doctor)
app.command("simulate")(simulate.simulate)
for _add_commands in plugins.load_all(plugins.COMMANDS, Callable):
    _add_commands(app)
for _command in (*app.registered_commands, *config.token_app.registered_commands):
    # typer keeps the line ends of all paragraphs but the first, and wraps each line again at the terminal's width.
    _command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_command.callback) or "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command (default: from the process's arguments). Ends with SystemExit: 0, 1 (failure, with one line on
    stderr), 2 (invalid usage) or 130 (Ctrl-C)."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # every fork is followed by exec; gRPC logs a line otherwise
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else a service that ends leaves a line of gRPC's log on stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals without UTF-8 show '?' instead
    try:
        app(args=None if arguments is None else list(arguments))
    except PdserveError as error:
        typer.echo(f"error: {' '.join(str(error).split())}{_elsewhere(error)}", err=True)
        raise SystemExit(2 if isinstance(error, ConfigError | InvalidRequest) else 1) from None
    except OSError as error:
        typer.echo(f"error: {error.filename or 'the output'}: {error.strerror or error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _elsewhere(error: PdserveError) -> str:
    """Where services of this user listen, if nothing answers at the target."""
    if not str(error).startswith("nothing answers"):
        return ""
    from ops.launch.state import ServiceState

    targets = [target for state in ServiceState.all() if state.process() is not None for target in state.targets]
    return f". Your services on this host: --target {' or '.join(targets)}" if targets else ""
