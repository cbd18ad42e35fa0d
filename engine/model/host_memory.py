"""How much memory this process may hope to get. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int:
    """The host's available memory, or what its control group's limit leaves if that is less."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no control group of its own, or no limit ("max")
        available = min(available, int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USED.read_text()))
    return available
