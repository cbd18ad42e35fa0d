"""Whether a port of this host can be listened on, and who holds it."""

from __future__ import annotations

import socket

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
                command = " ".join(psutil.Process(connection.pid).cmdline())[:_COMMAND_CHARS]
                return f"process {connection.pid} ({command})"
    except psutil.Error:  # it ended meanwhile, or may not be looked at
        return ""
    return ""


def bind_problem(host: str, port: int) -> str:
    """Why ``host`` and ``port`` (0: any) cannot be listened on here; empty if they can. ``host`` may be a name."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""
