"""`--quick`, which every benchmark that `make` names has: its smallest form.

It prints the same tables, and a last line with the same figures, after the fewest cases, the shortest windows and the
smallest buffers, with the model tiny where the benchmark does not need another shape. It shows that the benchmark runs.
Its figures mean nothing. It replaces what other options say about sizes and windows."""

from __future__ import annotations

from typing import Annotated

import typer

HELP = "smallest sizes, shortest windows: does it run?"
Quick = Annotated[bool, typer.Option("--quick", help=HELP)]
