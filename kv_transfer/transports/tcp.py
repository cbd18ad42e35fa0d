"""Transport over one TCP connection per link. Only the kernel copies payloads: from one pool, and into the other."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from kv_transfer.base import ENCRYPTED, KVLink
from kv_transfer.memory import Memory
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import SocketTransport
from kv_transfer.transports.tls_socket import start_tls
from pdserve.core.address import join_address
from pdserve.core.errors import PeerLost, TransferRefused
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread


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
