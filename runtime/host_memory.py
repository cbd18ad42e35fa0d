"""The memory that is available to this process. Does not import torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int:
    """Bytes of memory that the host has available, or that the limit of the control group leaves if that is less."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no control group of its own, or no limit ("max")
        available = min(available, int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USED.read_text()))
    return available
