"""What transports within one host share: the two ends meet at an abstract Unix socket and open each other's memory, and
the receiver copies payloads out of the sender's memory. An abstract socket has no file and ends with its process.
Processes of other users are refused."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.base import KVLink
from kv_transfer.fetch import Fetch, Payload, settled
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from kv_transfer.transports.socket_link import MAX_REFERENCES, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import SocketTransport
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region
from runtime.secret import ServiceSecret

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def host_id() -> str:
    """Equal in two processes if they can connect by an abstract Unix socket: the same running kernel, network
    namespace, and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.geteuid()}"


class UnixSocketTransport(SocketTransport):
    """``place`` names where on the host the shared memory lies, for example a GPU. Both ends must have the same."""

    def __init__(
        self, memory: Memory, secret: ServiceSecret, place: str | None = None, *, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, secret, timeout_s=timeout_s)
        self._place = host_id() if place is None else f"{host_id()}/{place}"

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections from processes on this host. ``host`` and ``port`` are ignored."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"pdserve-kv-{secrets.token_hex(16)}"
        server.bind(f"\0{name}")
        return self._serve(server, f"{self._place}/{name}")

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Why the endpoint is out of reach: it belongs to another host, user, or place."""
        theirs, _, _ = endpoint.address.rpartition("/")
        if theirs == self._place:
            return None
        if theirs.startswith(host_id()):
            return "it uses another GPU of this host"
        return "it is on another host, or another user's"

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection and the peer's memory."""
        if (obstacle := self.obstacle(endpoint)) is not None:
            raise PeerLost(f"no link to {endpoint.address}: {obstacle} ({self.name})")
        name = endpoint.address.rpartition("/")[2]
        return await self._open(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0{name}", endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(options)
        if user != os.geteuid():
            raise EOFError(f"process {process} belongs to user {user}, not to {os.geteuid()}")
        peer_memory = await self._share(connection)
        stream = SocketStream(connection, f"process {process}", self.name, self._timeout_s)
        return SharingLink(self.name, self._memory, stream, peer_memory)

    @abstractmethod
    async def _share(self, connection: socket.socket) -> Memory:
        """Exchange handles, and open the peer's memory. EOFError or TransferError if the peer does not fit."""


class SharingLink(SocketLink):
    """A link to a process whose memory this process has opened. ``peer_memory`` is closed with the link."""

    def __init__(self, transport: str, memory: Memory, stream: SocketStream, peer_memory: Memory) -> None:
        super().__init__(transport, memory, stream, peer_size=peer_memory.size)
        self.on_device = peer_memory.on_device
        self._peer_memory = peer_memory

    async def aclose(self) -> None:
        """Close the socket and the peer's memory."""
        try:
            await super().aclose()
        finally:
            self._peer_memory.close()

    def _refer(self, payload: Payload) -> Sequence[Region]:
        if len(payload.regions) <= MAX_REFERENCES and payload.regions:
            return payload.regions
        if self.on_device and payload.size:
            raise ValueError(f"a payload outside the pool ({self.transport})")
        return ()

    async def _fetch_references(self, references: Sequence[Region], fetch: Fetch) -> None:
        if isinstance(self._peer_memory, DeviceMemory):
            with fetch.writing():
                fetch.write_on_device(self._peer_memory.view, references)
                await settled(self.memory)
        else:
            self._copy(self._peer_memory, references, fetch)

    @staticmethod
    def _copy(memory: HostMemory, references: Sequence[Region], fetch: Fetch) -> None:
        """Not part of the coroutine: an error's traceback would keep the coroutine's frame, and with it a view of the
        memory."""
        for reference in references:
            fetch.write(memory.view(reference))
