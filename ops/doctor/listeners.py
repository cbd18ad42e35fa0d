"""Who holds a port of this host."""

from __future__ import annotations

import psutil

_COMMAND_CHARS = 80


def listener_on(port: int) -> str:
    """The process that listens on TCP ``port``, in words; empty if none does, or (another user's) it cannot be told."""
    if not port:
        return ""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    return "a process of another user"
                command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split())[:_COMMAND_CHARS]
                return f"process {connection.pid} ({command})"
    except psutil.Error:  # it ended meanwhile, or may not be looked at
        return ""
    return ""
