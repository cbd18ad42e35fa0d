"""Which host this is, as far as sockets without a network are concerned."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """The same for two processes exactly if they can meet at an abstract Unix socket: one kernel since its start, one
    network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"
