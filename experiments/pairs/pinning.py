"""Binds source and target to different cores."""

from __future__ import annotations

import os


def pin(role: str) -> None:
    """Bind this process to its first allowed core (source) or last one (target). The kernel tends to wake one side on
    the core of the other, so that both share it while another is idle. Libraries with threads of their own (NIXL,
    Mooncake) are faster without."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if role == "source" else cores[-1]})
