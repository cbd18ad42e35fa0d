"""Round trips that are as short as a connection allows, to compare clocks by: nothing of Ray or gRPC is in them.

The server answers every `PING` with when it had it and when it answered (its monotonic clock), and its wall clock minus
that clock.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass

from ops.doctor.dial import split_address

PING = b"pdsvping"
_PONG = struct.Struct("<ddd")
_IDLE_S = 5.0
_PINGS = 200
_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Another host's monotonic clock minus this one's, give or take ``error_s`` (half the shortest round trip), and the
    same of the wall clocks (``wall_s``, with the same error)."""

    offset_s: float
    error_s: float
    wall_s: float

    @property
    def is_ours(self) -> bool:
        """Whether it is the very same clock, which names tell and no measurement."""
        return self == SAME


SAME = ClockReading(0.0, 0.0, 0.0)


class PingServer:
    """Listens on ``host`` and ``port`` (0: a free one) until `close`. OSError if it cannot."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._server.bind((host, port))
            self._server.listen(64)
        except OSError:
            self._server.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="doctor-ping", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening. Closing twice is fine."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(_IDLE_S + 1.0)
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_IDLE_S)
                _answer(connection)


def _answer(connection: socket.socket) -> None:
    while len(connection.recv(len(PING), socket.MSG_WAITALL)) == len(PING):
        received_s = time.monotonic()
        wall_s = time.time() - time.monotonic()
        connection.sendall(_PONG.pack(received_s, time.monotonic(), wall_s))


def read_clock(address: str, timeout_s: float = 5.0) -> ClockReading:
    """Compare clocks with a `PingServer`, for a second at most: the shortest of many round trips counts. OSError if it
    does not answer."""
    best: ClockReading | None = None
    with socket.create_connection(split_address(address), timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started_s = time.monotonic()
        for _ in range(_PINGS):
            sent_s = time.monotonic()
            connection.sendall(PING)
            answer = connection.recv(_PONG.size, socket.MSG_WAITALL)
            arrived_s = time.monotonic()
            if len(answer) < _PONG.size:
                raise ConnectionResetError(f"{address} hung up")
            received_s, replied_s, their_wall_s = _PONG.unpack(answer)
            error_s = ((arrived_s - sent_s) - (replied_s - received_s)) / 2
            if best is None or error_s < best.error_s:
                offset_s = ((received_s - sent_s) + (replied_s - arrived_s)) / 2
                wall_s = offset_s + their_wall_s - (time.time() - time.monotonic())
                best = ClockReading(offset_s, error_s, wall_s)
            if arrived_s - started_s > _FOR_S:
                break
    assert best is not None, "there is one round trip at least"
    return best
