"""The command line: one file per command; what is heavy is imported inside the commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import typer

from ops.cli import bench, config, demo, doctor, generate, logs, model_info, scale, status, up
from ops.cli import list as list_command
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError

app = typer.Typer(
    name="pdserve",
    help="Serve an LLM on Ray with prefill and decode apart, and see for every request what the hand-off cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command("up")(up.up)
app.command("down")(up.down)
app.command("scale")(scale.scale)
app.command("list")(list_command.list_services)
app.command("logs")(logs.logs)
app.command("status")(status.status)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)
app.command("model-info")(model_info.model_info)
app.command("config")(config.config)
app.command("doctor")(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command (default: the process's own arguments). Ends with SystemExit: 0, 1 (it failed; one line on
    stderr says why), 2 (it was asked wrongly) or 130 (Ctrl-C)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows '?' for what it cannot show
    try:
        app(args=None if arguments is None else list(arguments))
    except PdserveError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2 if isinstance(error, ConfigError | InvalidRequest) else 1) from None
    except OSError as error:
        typer.echo(f"error: {error.filename or 'the output'}: {error.strerror or error}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
