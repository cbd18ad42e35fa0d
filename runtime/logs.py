"""Structured logs of the service's processes: one line per event, as text or as JSON, with the request's ids.

Code logs with the standard library. Ids that a task has bound with `bind_request` are added to every line that it logs.
Needs structlog, which the extra ``service`` brings."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

    from pdserve.core.config import LoggingConfig  # imports pydantic, which engines do without

VARIABLE = "PDSERVE_LOGGING"
"""Environment variable that passes a process's logging on to its children: level and format."""


def set_up_logging(config: LoggingConfig | None = None) -> None:
    """Log to stderr as ``config`` says; without it, as the process that started this one (default: text, INFO)."""
    import structlog

    if config is None:
        level, _, form = os.environ.get(VARIABLE, "INFO/text").partition("/")
    else:
        level, form = config.level, config.format
        os.environ[VARIABLE] = f"{level}/{form}"
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=form == "json")
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            stamp,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _line if form == "text" else structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log every call, such as those for metrics


def bind_request(request_id: str, attempt_id: str = "") -> None:
    """Add the ids to every line that the current task logs from now on."""
    from structlog.contextvars import bind_contextvars

    bind_contextvars(request_id=request_id, **({"attempt_id": attempt_id} if attempt_id else {}))


def _line(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """``TIME LEVEL LOGGER: MESSAGE [key=value …]``, then the traceback, if there is one."""
    time, level, name = event.pop("timestamp"), event.pop("level"), event.pop("logger")
    message, trace = event.pop("event"), event.pop("exception", "")
    ids = {key: event.pop(key) for key in ("request_id", "attempt_id") if key in event}
    rest = " ".join(f"{key}={value}" for key, value in {**ids, **event}.items())
    line = f"{time} {level.upper()} {name}: {message}{f' [{rest}]' if rest else ''}"
    return f"{line}\n{trace}" if trace else line


LOG_EVERY_S = 5.0


class LimitedLog:
    """Writes warnings to ``log``, at most one every `LOG_EVERY_S`. Each tells how many were left out since the one
    before. May be used by several threads."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._last_s = -LOG_EVERY_S
        self._left_out = 0

    def warning(self, message: str) -> None:
        """Log ``message``, unless another one was logged a moment ago."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s < LOG_EVERY_S:
                self._left_out += 1
                return
            left_out, self._left_out, self._last_s = self._left_out, 0, now_s
        self._log.warning("%s%s", message, f" ({left_out} like this were not logged)" if left_out else "")
