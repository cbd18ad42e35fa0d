"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

TargetOption = Annotated[str, typer.Option("--target", help="host:port of the service")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on one line instead")]

DEFAULT_TARGET = "localhost:50051"
