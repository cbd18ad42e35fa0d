"""Transport between processes of one host: payloads in the sender's pool are not sent at all, the receiver copies them
out of its own mapping of that pool, straight into its blocks.

The two meet at an abstract Unix socket (it has no file, and ends with its process), which carries the messages and,
once, the descriptor of each end's memory file. A process of another user is refused.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from core.errors import PeerLost
from core.handoff import KVEndpoint
from kv_transfer.base import KVLink
from kv_transfer.shared_memory import PeerMemory, SharedMemory
from kv_transfer.transports.host import host_id
from kv_transfer.transports.listener import SocketTransport
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.threads import in_thread

T = TypeVar("T")

_GREETING = b"pdserve-kv/shm/1"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ShmTransport(SocketTransport):
    """``memory`` is this worker's pool; without it (a pool that lies on a device) payloads travel over the socket."""

    name = "shm"

    def __init__(self, memory: SharedMemory | None = None, *, timeout_s: float = 10.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._memory = memory
        self._host = host_id()

    async def listen(self, host: str) -> KVEndpoint:
        """Accept connections of processes on this host, whatever address of it ``host`` is."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"pdserve-kv-{secrets.token_hex(16)}"
        server.bind(f"\0{name}")
        self._serve(server)
        return KVEndpoint(self.name, f"{self._host}/{name}")

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Another host."""
        return None if endpoint.address.startswith(f"{self._host}/") else "it is on another host"

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection, and exchange memory."""
        if (obstacle := self.obstacle(endpoint)) is not None:
            raise PeerLost(f"no link to {endpoint.address}: {obstacle} (shm)")
        name = endpoint.address.rpartition("/")[2]
        return await self._open(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{name}", endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> SocketLink:
        options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(options)
        if user != os.geteuid():
            raise EOFError(f"process {process} belongs to user {user}, not to {os.geteuid()}")
        fds = [] if self._memory is None else [self._memory.fd]
        await _ready(lambda: socket.send_fds(connection, [_GREETING], fds), connection, writing=True)
        greeting, ancillary, _, _ = await _ready(
            lambda: connection.recvmsg(len(_GREETING), socket.CMSG_SPACE(4)), connection, writing=False
        )
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        try:
            if greeting != _GREETING:
                raise EOFError("the peer speaks something else" if greeting else "the peer closed the connection")
            memory = PeerMemory(received[0]) if received else None
        finally:
            for fd in received:
                os.close(fd)
        if memory is not None:
            try:
                await in_thread("kv-shm-touch", memory.touch)
            except BaseException:
                memory.close()
                raise
        stream = SocketStream(connection, f"process {process}", self.name, self._timeout_s)
        return SocketLink(self.name, stream, self._memory, memory)


async def _ready(call: Callable[[], T], connection: socket.socket, *, writing: bool) -> T:
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
