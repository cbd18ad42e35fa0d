"""`pdserve demo`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.options import print_json, print_note, stderr_console, stdout_console, target_option, with_access
from pdserve.client.target import AccessOptions, Target

if TYPE_CHECKING:
    from rich.console import Console


@with_access
def demo(
    access: AccessOptions,
    target: Annotated[
        str | None,
        target_option("port or host:port of a running service (default: start one and end it afterwards)", None),
    ] = None,
    model: Annotated[str, typer.Option(help="model of the started service")] = "tiny",
    png: Annotated[Path, typer.Option(help="path of the picture")] = Path("out/demo/waterfall.png"),
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="rounds of the paired comparison (default: 5, or fewer within 25 s)"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the findings as one JSON object on stdout, all else on stderr")
    ] = False,
) -> None:
    """Send 8 prompts of very different lengths at once, show the waterfall of each, and measure what the hand-off
    costs.

    Each request has its own salt, so that no prefix cache holds any of its KV."""
    import asyncio

    from ops.demo.run import run_demo
    from ops.waterfall.picture import check_picture

    check_picture("--png", png)
    given = None if target is None else Target.of(target, **access)
    console = stderr_console() if as_json else stdout_console()
    with _service(given, model, stderr_console()) as service:
        report = asyncio.run(run_demo(service, png, console, rounds))
    if as_json:
        print_json(report.to_dict())
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def _service(target: Target | None, model: str, console: Console) -> Iterator[Target]:
    if target is not None:
        yield target
        return
    from ops.launch.detach import start_detached, stop_detached
    from pdserve.core.config import PdserveConfig

    settings = PdserveConfig.load(None, {"model.path": model, "gateway.port": 0})

    def show(stage: str) -> None:
        console.print(f"  {stage}", style="dim")

    port = start_detached(settings, show, lambda text: print_note(console, text))
    try:
        yield Target.of(f"localhost:{port}")
    finally:
        console.print("  stopping the service", style="dim")
        stop_detached(port)
