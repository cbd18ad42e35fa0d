"""Transport over one TCP connection per link, with TLS if the service has it. Only the kernel copies payloads, from one
pool and into the other; TLS copies them once more at either end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from kv_transfer.base import ENCRYPTED, KVLink
from kv_transfer.memory import Memory
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import SocketTransport, ready
from pdserve.core.address import join_address
from pdserve.core.errors import PeerLost, TransferRefused
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import SERVER_NAME, PlaneTls
from runtime.secret import AuthenticationFailed, ServiceSecret
from runtime.threads import in_thread

_CALL_BYTES = 2**20
"""How much one call moves at most, so that the caller can let other tasks run."""
_RECORD_BYTES = 2**14 + 2**9
"""More than a record has with its header and tag."""
_BLOCKED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TcpTransport(SocketTransport):
    """Listens on a TCP port. With ``tls``, connections between hosts have to be encrypted: those of this transport are,
    after the proofs; subclasses whose payloads are not reach peers of the same host only."""

    name = "tcp"
    encrypts = True

    def __init__(
        self, memory: Memory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, secret, timeout_s=timeout_s)
        self._tls = tls
        if tls is not None and self.encrypts:
            self.note = ENCRYPTED

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections."""
        server = await bind(host, port, self.name)
        return self._serve(server, join_address(host, server.getsockname()[1]))

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Why the endpoint is out of reach: its payloads would travel between hosts in the clear."""
        if self._tls is None or self.encrypts or _host(endpoint.address) == _host(self.address):
            return None
        return "it is on another host, and this transport cannot encrypt (cluster.tls_cert)"

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection."""
        if (obstacle := self.obstacle(endpoint)) is not None:
            raise TransferRefused(f"no link to {endpoint.address}: {obstacle} ({self.name})")
        host, _, port = endpoint.address.rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                family, address = await _resolve(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            why = error or "its name cannot be resolved"
            raise PeerLost(f"no link to {endpoint.address}: {why} ({self.name})") from None
        return await self._open(socket.socket(family, socket.SOCK_STREAM), address, endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        tune(connection)
        if self._tls is not None:
            connection = await start_tls(connection, self._tls, dialling=connecting)
        return SocketLink(self.name, self._memory, SocketStream(connection, peer, self.name, self._timeout_s))


def _host(address: str) -> str:
    return address.rpartition(":")[0]


async def bind(host: str, port: int, transport: str) -> socket.socket:
    """A listening socket on ``host`` and ``port`` (0: a free one). PeerLost if the address is not one of this host, or
    the port is taken."""
    server: socket.socket | None = None
    try:
        family, address = await _resolve(host, port)
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier listener may linger
        server.bind(address)
        server.listen()
    except OSError as error:
        if server is not None:
            server.close()
        raise PeerLost(f"cannot listen on {host}, port {port or 'any'}: {error} ({transport})") from None
    return server


async def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    def resolve() -> tuple[socket.AddressFamily, Any]:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return family, address

    return await in_thread("kv-tcp-resolve", resolve)


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and detect hosts that vanished by TCP keep-alives."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class TlsSocket(ssl.SSLSocket):
    """The methods that `SocketStream` uses, as `socket.socket` has them. They raise BlockingIOError where the socket
    has to become ready first, and OSError if TLS fails. A write that blocked has to be repeated with the same bytes.
    """

    def send(self, data: Any, flags: int = 0) -> int:
        """Encrypt and send what the socket takes of ``data``, at most a record."""
        try:
            return super().send(data, flags)
        except _BLOCKED:
            raise BlockingIOError from None

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Encrypt and send what the socket takes of ``buffers``, but not more than `_CALL_BYTES`."""
        sent = 0
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest.nbytes:
                if sent >= _CALL_BYTES:
                    return sent
                try:
                    count = self.send(rest)
                except BlockingIOError:
                    if sent:
                        return sent
                    raise
                sent += count
                rest = rest[count:]
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive and decrypt at most a record into ``buffer``. 0 if the peer has closed the connection."""
        view = memoryview(buffer)
        try:
            return super().recv_into(view, nbytes or view.nbytes, flags)
        except _BLOCKED:
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Iterable[Any], *_: Any
    ) -> tuple[int, list[Any], int, Any]:
        """Receive and decrypt what has arrived into ``buffers``, but not more than `_CALL_BYTES`."""
        received = 0
        for buffer in buffers:
            room = memoryview(buffer)
            while room.nbytes and received < _CALL_BYTES:
                try:
                    count = self.recv_into(room)
                except BlockingIOError:
                    if not received:
                        raise
                    count = 0
                if not count:  # an end shows again with the next call
                    return received, [], 0, None
                received += count
                room = room[count:]
        return received, [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut the connection down. `ssl.SSLSocket` would go on without TLS."""
        socket.socket.shutdown(self, how)

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        """Set an option. A low-water mark leaves out a record, of which OpenSSL may have a part."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            value = max(1, value - _RECORD_BYTES)
        super().setsockopt(level, option, value)


async def start_tls(connection: socket.socket, tls: PlaneTls, *, dialling: bool) -> TlsSocket:
    """Shake hands on a connected, non-blocking socket, which the result replaces. AuthenticationFailed if the
    peer has no certificate of the service or speaks no TLS, OSError if the connection breaks; both close it. Needs a
    timeout around it."""
    context = tls.dialling if dialling else tls.listening
    context.sslsocket_class = TlsSocket
    encrypted = context.wrap_socket(
        connection,
        server_side=not dialling,
        server_hostname=SERVER_NAME if dialling else None,
        do_handshake_on_connect=False,
    )
    assert isinstance(encrypted, TlsSocket)
    shaken = False
    try:
        while not shaken:
            try:
                encrypted.do_handshake()
                shaken = True
            except _BLOCKED as blocked:
                await ready(encrypted, writing=isinstance(blocked, ssl.SSLWantWriteError))
    except ssl.SSLEOFError:
        raise EOFError("the peer closed the connection during the TLS handshake") from None
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason or str(error)
        raise AuthenticationFailed(f"TLS failed: {why}") from None
    finally:
        if not shaken:
            encrypted.close()
    return encrypted
