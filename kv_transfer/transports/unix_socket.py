"""What transports within one host have in common: an abstract Unix socket (it has no file, and ends with its process),
at which no process of another user is let in."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from kv_transfer.base import KVLink
from kv_transfer.memory import Memory
from kv_transfer.transports.host import host_id
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_transport import SocketTransport
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint

_CREDENTIALS = struct.Struct("3i")  # process, user, group

T = TypeVar("T")


class UnixSocketTransport(SocketTransport):
    """``place`` says where the memory is that its links share: both ends have to be there. By default the host."""

    def __init__(self, memory: Memory, place: str | None = None, *, timeout_s: float = 10.0) -> None:
        super().__init__(memory, timeout_s=timeout_s)
        self._place = host_id() if place is None else f"{host_id()}/{place}"

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections of processes on this host, whatever address of it ``host`` is; there are no ports."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"pdserve-kv-{secrets.token_hex(16)}"
        server.bind(f"\0{name}")
        self._serve(server)
        return KVEndpoint(self.name, f"{self._place}/{name}")

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Another host, or another place on it."""
        theirs, _, _ = endpoint.address.rpartition("/")
        if theirs == self._place:
            return None
        if theirs.startswith(host_id()):
            return "it uses another GPU of this host"
        return "it is on another host, or another user's"

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection, and exchange what the two share."""
        if (obstacle := self.obstacle(endpoint)) is not None:
            raise PeerLost(f"no link to {endpoint.address}: {obstacle} ({self.name})")
        name = endpoint.address.rpartition("/")[2]
        return await self._open(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{name}", endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> SocketLink:
        options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(options)
        if user != os.geteuid():
            raise EOFError(f"process {process} belongs to user {user}, not to {os.geteuid()}")
        return await self._share(connection, f"process {process}")

    @abstractmethod
    async def _share(self, connection: socket.socket, peer: str) -> SocketLink:
        """Exchange what is needed to read the other's memory; EOFError or TransferError if the peer does not fit."""


async def ready(call: Callable[[], T], connection: socket.socket, *, writing: bool) -> T:
    """What ``call`` returns once the socket lets it."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    while True:
        try:
            return call()
        except BlockingIOError:
            possible = loop.create_future()
            add(connection, lambda future=possible: None if future.done() else future.set_result(None))  # type: ignore[misc]
            try:
                await possible
            finally:
                remove(connection)
