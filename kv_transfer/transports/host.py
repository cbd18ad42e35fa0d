"""Whom sockets without a network reach from here."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """The same for two processes exactly if they can meet at an abstract Unix socket, and let each other in: one kernel
    since its start, one network namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.geteuid()}"
