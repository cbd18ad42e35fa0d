"""The consoles that commands print to."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 120  # a pipe has no width; rich would take 80 and fold wide tables


def stdout_console() -> Console:
    """For what the command was asked for."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """For progress and remarks, so that stdout stays clean."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)
