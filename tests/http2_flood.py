"""A client of HTTP/2 by hand, which sends as much as a gRPC server's flow control lets it, and never waits."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from experiments.benchmarks.http2_attacks import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, headers

_FRAME_BYTES = 2**14


def flood(address: str, method: str, num_bytes: int) -> None:
    """Call ``method`` of the server at ``address`` with a message that is announced to have 4 GiB, and send
    ``num_bytes`` of it at once. Returns when the server has closed the connection, or has kept it open for 2 s."""
    host, _, port = address.rpartition(":")
    sent = 0
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(2.0)
        block = headers(address, method)
        opening = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, block)
        message = struct.pack(">BI", 0, 2**32 - 1)
        try:
            connection.sendall(opening)
            while sent < num_bytes:
                connection.sendall(frame(DATA, 0, 1, message + bytes(_FRAME_BYTES - len(message))))
                sent += _FRAME_BYTES
                message = b""
            while connection.recv(2**16):
                continue
        except OSError:  # the server has closed the connection, or keeps it open
            pass


class PeakMemory:
    """How much more memory than now a process has at its peak, according to Linux."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        (self._process / "clear_refs").write_text("5")  # the peak is what there is now
        self._before = self._peak()

    def growth_bytes(self) -> int:
        """Since this object was made."""
        return self._peak() - self._before

    def _peak(self) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
