"""Clocks that differ as those of hosts do: processes in time namespaces of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

CLONE_NEWTIME = 0x80


def shifted(seconds: int) -> None:
    """Move this process's children (and whatever it becomes by exec) to a monotonic clock that many seconds ahead."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWTIME)")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\n")


def time_namespaces_problem() -> str | None:
    """Why clocks cannot be shifted here; None if they can."""
    read = [sys.executable, "-c", "import time; print(time.monotonic())"]
    try:
        ahead = float(subprocess.run(read, preexec_fn=lambda: shifted(100_000), capture_output=True, check=True).stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return f"time namespaces need root and a kernel that has them: {error}"
    behind = float(subprocess.run(read, capture_output=True, check=True).stdout)
    return None if ahead - behind > 90_000 else "this kernel does not switch time namespaces on exec"
