"""TCP checks of the doctor: connection attempts and clock comparison.

Clocks are compared over a plain TCP connection, so that no gRPC or Ray latency enters the round trips. The server
answers each `PING` with the times at which it received the ping and sent the answer (monotonic clock), and with the
difference between its wall clock and its monotonic clock.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdserve.core.address import join_address, split_address

PING = b"pdsvping"
_PONG = struct.Struct("<ddd")
_IDLE_S = 5.0
_PINGS = 200
_PING_FOR_S = 1.0
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL, errno.ENETDOWN}


class Obstacle(StrEnum):
    """Result of a connection attempt. `dial` returns one of the first five; the others occur between KV ends only."""

    NONE = "open"
    REFUSED = "refused"  # the host answers, but nothing listens there or a firewall rejects the connection
    TIMED_OUT = "timed out"  # no answer: a firewall that drops packets, a partition, or a host that is off
    UNREACHABLE = "unreachable"  # no route, or the route is prohibited
    NO_SUCH_HOST = "no such host"
    NO_TRANSPORT = "no transport"  # the two ends share no transport
    LAYOUT = "layout"  # different model, dtype, or block size
    BROKEN = "broken"  # failed after the connection was established
    NOT_TRIED = "not tried"  # one end could not listen, which is a finding of its own


REMEDIES: Mapping[Obstacle, str] = {
    Obstacle.NONE: "",
    Obstacle.REFUSED: "nothing listens there, or a firewall rejects the connection: open the port (see "
    "cluster.port_base)",
    Obstacle.TIMED_OUT: "packets are dropped: open the port in the firewall between the two (see cluster.port_base), "
    "or name a network that connects them with transfer.interface",
    Obstacle.UNREACHABLE: "no route, or a rule prohibits it: see `ip route get` and the firewall on the connecting "
    "host, or name a network that connects the two with transfer.interface",
    Obstacle.NO_SUCH_HOST: "the name cannot be resolved there: use an address",
    Obstacle.NO_TRANSPORT: "set transfer.transport to auto, or to one that connects the two hosts (tcp)",
    Obstacle.LAYOUT: "all hosts need the same model, dtype and block size: see the findings about the model",
    Obstacle.BROKEN: "another service may answer at that address: see the findings about versions and interfaces",
}


def dial(address: str, timeout_s: float) -> Obstacle:
    """Open a TCP connection to ``host:port`` and close it again. ValueError for a malformed address."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except socket.gaierror:
        return Obstacle.NO_SUCH_HOST
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
            return Obstacle.TIMED_OUT
        return Obstacle.UNREACHABLE if error.errno in _UNREACHABLE else Obstacle.REFUSED
    return Obstacle.NONE


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Another host's clocks relative to this host's, in seconds: monotonic (``offset_s``) and wall (``wall_s``), both
    ± ``error_s``, which is half the shortest round trip."""

    offset_s: float
    error_s: float
    wall_s: float

    @property
    def is_ours(self) -> bool:
        """Whether it is this host's own clock, which is known by its id and not measured."""
        return self == SAME


SAME = ClockReading(0.0, 0.0, 0.0)


class PingServer:
    """Answers `read_clock` on ``host`` and ``port`` (0: any free port), one client after the other, until `close`.
    OSError if it cannot listen."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=64)
        self.address = join_address(host, self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="doctor-ping", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Further calls have no effect."""
        with contextlib.suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_IDLE_S)
                while len(connection.recv(len(PING), socket.MSG_WAITALL)) == len(PING):
                    received_s = time.monotonic()
                    wall_s = time.time() - time.monotonic()
                    connection.sendall(_PONG.pack(received_s, time.monotonic(), wall_s))


def read_clock(address: str, timeout_s: float = 5.0) -> ClockReading:
    """Compare clocks with a `PingServer` for at most a second; the shortest round trip counts. OSError if the server
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
                raise ConnectionResetError(f"{address} closed the connection")
            received_s, replied_s, their_wall_s = _PONG.unpack(answer)
            error_s = ((arrived_s - sent_s) - (replied_s - received_s)) / 2
            if best is None or error_s < best.error_s:
                offset_s = ((received_s - sent_s) + (replied_s - arrived_s)) / 2
                wall_s = offset_s + their_wall_s - (time.time() - time.monotonic())
                best = ClockReading(offset_s, error_s, wall_s)
            if arrived_s - started_s > _PING_FOR_S:
                break
    assert best is not None, "there is at least one round trip"
    return best
