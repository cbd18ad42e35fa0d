"""What the service's parts log while a simulation runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from simulator.engine import DiskError
from simulator.loop import BEGIN_S, WorldLoop


class WorldLog(logging.Handler):
    """The lines that are logged. Unexpected errors are also passed to ``on_error``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.on_error: Callable[[str], None] = self.lines.append

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line with the time and the thread of the world."""
        loop = asyncio._get_running_loop()
        if isinstance(loop, WorldLoop):
            text = f"{loop.name}: {record.getMessage()}"
            if record.exc_info and record.exc_info[1] is not None:
                text += f": {record.exc_info[1]!r}"
                if record.levelno >= logging.ERROR and not isinstance(record.exc_info[1], DiskError):
                    self.on_error(text)
            self.lines.append(f"{loop.time() - BEGIN_S:10.6f} {text}")


@contextlib.contextmanager
def logged(trace: bool) -> Iterator[WorldLog]:
    """Have a `WorldLog` take what is logged, instead of all other handlers: errors, or with ``trace`` everything."""
    log, root = WorldLog(), logging.getLogger()
    level, disabled, handlers = root.level, logging.root.manager.disable, root.handlers
    root.handlers = [log]
    root.setLevel(logging.DEBUG if trace else logging.ERROR)
    logging.disable(logging.NOTSET if trace else logging.WARNING)
    try:
        yield log
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.disable(disabled)
