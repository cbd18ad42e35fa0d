"""The first code of a server's process: binds it to cores, has it end with its parent, and becomes the server. Run by
`external_engines.process`."""

from __future__ import annotations

import os
import signal
import sys

from runtime.process import end_with_parent


def main() -> None:
    """``launch CORES COMMAND…``: CORES are numbers separated by commas; empty: all."""
    cores, *command = sys.argv[1:]
    end_with_parent(signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
