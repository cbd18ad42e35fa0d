"""A log of what may happen very often, such as rejected connections."""

from __future__ import annotations

import logging
import threading
import time

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
