"""Source and target on cores of their own."""

from __future__ import annotations

import os


def pin(role: str) -> None:
    """Bind this process to the first core it may use (source) or the last (target): the kernel likes to wake the one
    where the other runs, and then both share a core while the next is idle. Libraries with threads of their own (NIXL,
    Mooncake) do better without, and are left alone."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if role == "source" else cores[-1]})
