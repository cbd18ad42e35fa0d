"""A client of HTTP/2 by hand, which sends as much as a gRPC server's flow control lets it, and never waits."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4
_FRAME_BYTES = 2**14


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal header field without indexing (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def flood(address: str, method: str, num_bytes: int) -> None:
    """Call ``method`` of the server at ``address`` with a message that is announced to have 4 GiB, and send
    ``num_bytes`` of it at once. Returns when the server has closed the connection, or has kept it open for 2 s."""
    host, _, port = address.rpartition(":")
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    sent = 0
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(2.0)
        headers = b"".join(_header(*field) for field in fields.items())
        opening = _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS, 1, headers)
        message = struct.pack(">BI", 0, 2**32 - 1)
        try:
            connection.sendall(opening)
            while sent < num_bytes:
                connection.sendall(_frame(_DATA, 0, 1, message + bytes(_FRAME_BYTES - len(message))))
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
