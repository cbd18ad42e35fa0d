"""Bounds what connections of the public gRPC server may do besides requests.

gRPC's core bounds the streams of a connection, and drops or delays those that exceed them (`server_options`). It does
not bound the frames that a client sends without a request (SETTINGS, WINDOW_UPDATE, PRIORITY, headers without end,
streams that are reset at once) nor the connections of a host, and it has no hook for that. So the guard looks at the
connections of the port several times per second, compares the bytes that the kernel has received on each with those
that its calls account for, and shuts down what exceeds a bound. gRPC then sees that the client has left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import struct
import time
from collections import defaultdict, deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from pdserve.core.clock import Clock
from runtime.logs import LimitedLog

log = logging.getLogger(__name__)

MAX_STREAMS = 2048
"""Limit: streams of a connection at a time. Then: clients wait.

gRPC refuses further ones, at times also when streams that have just ended are not cleared up yet. So it is more than
honest clients need."""
LOOK_EVERY_S = 0.05
MAX_CPU_SHARE = 0.05
"""Looks are rarer where they would take more of a core than this: with some hundred connections and more."""
FREE_BYTES = 2**22
"""Limit: what a connection sends besides requests, before its first request. Then: closed."""
KNOWN_FREE_BYTES = 2**26
"""Limit: bytes besides requests, after the first one.

Others may wait in its streams."""
BYTES_PER_S = 2**16
"""Limit: bytes added for each second."""
BYTES_PER_MESSAGE = 2**13
"""Limit: bytes added for each request.

Half of what the server has sent is added, too, because clients answer it with window updates and pings."""
MAX_READING = 16
"""Of so many messages that are being read, each may be as long as the longest that is valid."""
MAX_UNREAD_BYTES = 2**16
"""gRPC takes so much of a message that is not read. A call that was refused may have sent as much as the calls of its
connection did on average, and no more than this."""
LOOKS = 2
"""So many looks in a row have to see the excess: a request that has just come may not have been read yet."""
EMPTY_CALLS = 2 * MAX_STREAMS
"""Limit: calls of a connection without a valid token, or reset before their message. Then: closed.

Of so many calls that were refused for other reasons the message counts."""
EMPTY_CALLS_PER_S = 50.0
"""Limit: such calls added for each second."""
ALERT_S = 60.0
ALERT_SHARE = 1 / 16
"""Limit: share of the bounds above for connections that a host opens within 60 s after one of its was closed.

So a client gains little by connecting again and again. What is added for each second is not reduced."""
MAX_UNKNOWN = 256
"""Limit: connections without a call that was let in. Then: the host with the most loses its oldest."""
MAX_FROM_ONE_HOST = 1024
"""Limit: connections from one address. Then: the latest are closed."""

_SENT_RECEIVED = struct.Struct("=QQ")
_SENT_RECEIVED_AT = 120  # in Linux's struct tcp_info: bytes_acked, bytes_received
_TCP_INFO_BYTES = _SENT_RECEIVED_AT + _SENT_RECEIVED.size

Peer = tuple[str, int]


@dataclass(slots=True)
class _Connection:
    """What the calls of a connection account for."""

    seen_s: float  # when the guard saw it first
    share: float = 1.0  # of the bounds that are not for each second or message (see `ALERT_SHARE`)
    is_known: bool = False  # a call had a valid token, or needed none
    reading: int = 0  # calls whose message is being read
    empty: int = 0  # calls without a valid token, or that ended without a message
    unread: int = 0  # calls that were refused before their message was read
    messages: int = 0  # that were read
    message_bytes: int = 0
    looks: int = 0  # so many in a row saw an excess
    is_shut: bool = False

    @property
    def has_requests(self) -> bool:
        """Whether a request was read, or refused before that."""
        return bool(self.messages or self.unread)

    def empty_calls(self, age_s: float) -> float:
        """How many calls may be empty, and of how many unread ones the message counts."""
        return EMPTY_CALLS * self.share + EMPTY_CALLS_PER_S * age_s

    def request_bytes(self, age_s: float, max_message_bytes: int) -> float:
        """What its requests account for: those that were read, that are being read, and that were refused."""
        unread = min(self.unread, self.empty_calls(age_s))
        average_bytes = min(self.message_bytes / self.messages, MAX_UNREAD_BYTES) if self.messages else 0
        reading = max(1.0, self.share * min(self.reading, MAX_READING)) if self.reading else 0
        count = self.messages + unread
        return self.message_bytes + BYTES_PER_MESSAGE * count + average_bytes * unread + max_message_bytes * reading


class _Socket(NamedTuple):
    """A socket of gRPC's, which may close it at any time."""

    number: int
    inode: int

    def tcp_info(self) -> bytes:
        """Linux's ``struct tcp_info``; empty if the socket was closed."""
        with contextlib.suppress(OSError):
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self.number)
            try:
                return borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            finally:
                borrowed.detach()
        return b""

    def shut(self) -> None:
        """Shut the connection down, as if the client had left."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.number)) as connected:
            if os.fstat(connected.fileno()).st_ino == self.inode:  # the number may be another file's by now
                connected.shutdown(socket.SHUT_RDWR)


class ConnectionGuard:
    """Guards the connections of this process's `port`. ``max_message_bytes``: the longest message of a call."""

    def __init__(self, max_message_bytes: int, clock: Clock) -> None:
        self.port = 0
        """Set before the first `look`: the server that listens there is made after the guard that it tells of calls."""
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._log = LimitedLog(log)
        self._connections: dict[Peer, _Connection] = {}
        self._sockets: dict[int, Peer | None] = {}  # by inode; None: not one of the port's connections
        self._alert: dict[str, float] = {}  # hosts, and until when
        self.pause_s = LOOK_EVERY_S
        """How long to wait until the next `look`."""

    def authenticated(self, peer: str) -> None:
        """Note a call of ``peer`` (as gRPC names it) that has a valid token, or needs none."""
        self._of(_key(peer)).is_known = True

    def unauthenticated(self, peer: str) -> None:
        """Note a call without a valid token."""
        self._of(_key(peer)).empty += 1

    def refused(self, peer: str) -> None:
        """Note a call that was authenticated and then refused, before its message was read."""
        self._of(_key(peer)).unread += 1

    async def read(self, peer: str, reading: Awaitable[object]) -> bytes | None:
        """The message that ``reading`` gives, of a call that was authenticated. None if it ends without one."""
        connection = self._of(_key(peer))
        connection.reading += 1
        message: object = None
        try:
            message = await reading
        finally:
            connection.reading -= 1
            if isinstance(message, bytes):
                connection.messages += 1
                connection.message_bytes += len(message)
            else:
                connection.empty += 1
        return message if isinstance(message, bytes) else None

    def look(self) -> None:
        """Shut down the connections that exceed a bound."""
        begin_s = time.perf_counter()
        found = self._find()
        now_s = self._clock.now()
        self._alert = {host: until_s for host, until_s in self._alert.items() if until_s > now_s}
        for peer in self._connections.keys() - found.keys():
            del self._connections[peer]
        excess = self._too_many([(peer, self._of(peer)) for peer in found])
        for peer, connected in found.items():
            connection = self._connections[peer]
            if connection.is_shut:
                continue  # gRPC has not noticed yet
            why = self._excess(connection, connected, now_s)
            connection.looks = connection.looks + 1 if why else 0
            if connection.looks >= LOOKS:
                self._alert[peer[0]] = now_s + ALERT_S
            elif not (why := excess.get(peer, "")):
                continue
            self._log.warning(f"a connection from {peer[0]} is closed: {why}")
            connection.is_shut = True
            connected.shut()
        self.pause_s = max(LOOK_EVERY_S, (time.perf_counter() - begin_s) / MAX_CPU_SHARE)

    def _of(self, peer: Peer) -> _Connection:
        connection = self._connections.get(peer)
        if connection is None:
            share = ALERT_SHARE if peer[0] in self._alert else 1.0
            connection = self._connections[peer] = _Connection(self._clock.now(), share)
        return connection

    def _find(self) -> dict[Peer, _Socket]:
        """The sockets of the port's connections."""
        before, self._sockets = self._sockets, {}
        found: dict[Peer, _Socket] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                number = int(name)
                status = os.fstat(number)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                inode = status.st_ino
                peer = before[inode] if inode in before else _peer(number, self.port)
                self._sockets[inode] = peer
                if peer is not None:
                    found[peer] = _Socket(number, inode)
        return found

    def _too_many(self, connections: list[tuple[Peer, _Connection]]) -> dict[Peer, str]:
        """Connections to shut down because there are too many: from one host, or unknown ones. Of these the host with
        the most loses its oldest."""
        excess: dict[Peer, str] = {}
        connections.sort(key=lambda each: each[1].seen_s)
        unknown: defaultdict[str, deque[Peer]] = defaultdict(deque)
        for peer, connection in connections:
            if not connection.is_known:
                unknown[peer[0]].append(peer)
        count = sum(map(len, unknown.values()))
        for _ in range(count - MAX_UNKNOWN):
            excess[max(unknown.values(), key=len).popleft()] = f"{count} connections are without a call"
        by_host: defaultdict[str, list[Peer]] = defaultdict(list)
        for peer, _ in connections:
            by_host[peer[0]].append(peer)
        for host, peers in by_host.items():
            for peer in peers[MAX_FROM_ONE_HOST:]:
                excess[peer] = f"{len(peers)} connections come from {host}"
        return excess

    def _excess(self, connection: _Connection, connected: _Socket, now_s: float) -> str:
        """Why a connection is shut down; empty if it is not."""
        age_s = now_s - connection.seen_s
        if connection.empty > connection.empty_calls(age_s):
            return f"{connection.empty} calls had no valid token, or were reset before their message came"
        info = connected.tcp_info()
        if len(info) < _TCP_INFO_BYTES:
            return ""  # an old kernel does not count
        sent, received = _SENT_RECEIVED.unpack_from(info, _SENT_RECEIVED_AT)
        free = connection.share * (KNOWN_FREE_BYTES if connection.has_requests else FREE_BYTES) + BYTES_PER_S * age_s
        if received > free + connection.request_bytes(age_s, self._max_message_bytes) + sent // 2:
            return f"{received} bytes came in {age_s:.1f} s, of which {connection.message_bytes} are requests"
        return ""


def _key(peer: str) -> Peer:
    """The address in gRPC's name of a peer."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else ("", 0)


def _peer(number: int, port: int) -> Peer | None:
    """The other end of a connection that was accepted on ``port``; None for other sockets."""
    with socket.socket(fileno=os.dup(number)) as connected:
        if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type is not socket.SOCK_STREAM:
            return None
        try:
            if connected.getsockname()[1] != port:
                return None
            host, peer_port = connected.getpeername()[:2]
        except OSError:  # it listens
            return None
    mapped = getattr(ipaddress.ip_address(host.partition("%")[0]), "ipv4_mapped", None)
    return str(mapped or host), peer_port
