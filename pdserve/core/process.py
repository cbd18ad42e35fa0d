"""Binds a process to its parent."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when the thread that started it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
