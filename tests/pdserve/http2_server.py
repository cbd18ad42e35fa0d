"""A server that speaks just enough HTTP/2 to refuse: for what no gRPC server can be told to do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
_PREFACE_BYTES = 24
_HEADER_BYTES = 9

Answer = Callable[["Connection", int], None]
"""What is done with the stream of that number, once its headers have come."""


class Connection:
    """One client's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        """Send one frame."""
        self._socket.sendall(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    def reset(self, stream: int, code: int) -> None:
        """End a stream with an HTTP/2 error code."""
        self.send(RST_STREAM, 0, stream, struct.pack(">I", code))

    def go_away(self, last_stream: int, code: int) -> None:
        """Tell the client that streams after ``last_stream`` are not answered any more."""
        self.send(GOAWAY, 0, 0, struct.pack(">II", last_stream, code))

    def serve(self, answer: Answer) -> None:
        """Read frames until the client has gone."""
        with contextlib.suppress(OSError), self._socket, self._socket.makefile("rb") as frames:
            frames.read(_PREFACE_BYTES)
            self.send(SETTINGS, 0, 0)
            while len(header := frames.read(_HEADER_BYTES)) == _HEADER_BYTES:
                payload = frames.read(int.from_bytes(header[:3]))
                kind, flags, stream = header[3], header[4], int.from_bytes(header[5:])
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self.send(kind, ACK, 0, payload if kind == PING else b"")
                elif kind == HEADERS:
                    answer(self, stream)


class HTTP2Server:
    """Listens on a port of its own; ``target`` says where. ``answer`` decides on each stream."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=Connection(connection).serve, args=(self._answer,), daemon=True).start()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
