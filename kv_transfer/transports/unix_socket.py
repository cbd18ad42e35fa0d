"""Transports within one host: the two ends meet at an abstract Unix socket and open each other's memory, and the
receiver copies payloads out of the sender's memory. An abstract socket has no file and ends with its process. Processes
of other users are refused.

- shm: the memory is a file, whose descriptor travels once over the socket;
- cuda_ipc: the memory is on the GPU that both workers use, and its CUDA IPC handle travels once over the socket.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from kv_transfer.base import KVLink
from kv_transfer.fetch import Fetch, Payload, settled
from kv_transfer.memory import DeviceMemory, HostMemory, Memory
from kv_transfer.transports.socket_link import MAX_REFERENCES, SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import SocketTransport, read_exactly, ready
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_SHM_GREETING = b"pdserve-kv/shm/1"
_IPC_GREETING, _IPC_NAME = struct.Struct("<16sI"), b"pdserve-kv/ipc/1"  # the name, and the length of the handle
_MAX_HANDLE_BYTES = 4096


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


class ShmTransport(UnixSocketTransport):
    """For pools in memory files. ``tls`` is not needed within a host."""

    name = "shm"

    def __init__(
        self, memory: HostMemory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, secret, timeout_s=timeout_s)
        self._fd = memory.fd

    async def _share(self, connection: socket.socket) -> HostMemory:
        # The peer gets a read-only descriptor: only the owner of a pool writes to it.
        readable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)
        try:
            socket.send_fds(connection, [_SHM_GREETING], [readable])
        finally:
            os.close(readable)
        await ready(connection)
        greeting, ancillary, _, _ = connection.recvmsg(len(_SHM_GREETING), socket.CMSG_SPACE(4))
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        try:
            if greeting != _SHM_GREETING:
                raise EOFError("the peer speaks another protocol" if greeting else "the peer closed the connection")
            if not received:
                raise EOFError("the peer shares no memory")
            memory = HostMemory(received[0], writable=False)
        finally:
            for fd in received:
                os.close(fd)
        try:
            await in_thread("kv-shm-touch", memory.touch)
        except BaseException:
            memory.close()
            raise
        return memory


class CudaIpcTransport(UnixSocketTransport):
    """For pools on the GPU with the UUID ``gpu`` (default: that of the memory). ``opened`` opens a peer's handle.
    ``tls`` is not needed within a host."""

    name = "cuda_ipc"

    def __init__(
        self,
        memory: DeviceMemory,
        secret: ServiceSecret,
        gpu: str | None = None,
        *,
        tls: PlaneTls | None = None,
        timeout_s: float = 10.0,
        opened: Callable[[Sequence[Any]], DeviceMemory] | None = None,
    ) -> None:
        if gpu is None:
            gpu = "" if memory.cuda is None else memory.cuda.uuid(memory.index)
        super().__init__(memory, secret, gpu, timeout_s=timeout_s)
        # The peer may see its GPU under another index; by its UUID it is the same as this end's.
        self._opened = opened or (lambda handle: DeviceMemory.open(handle, memory.index, memory.cuda))
        self._handle = memory.handle

    async def _share(self, connection: socket.socket) -> DeviceMemory:
        loop = asyncio.get_running_loop()
        handle: bytes = msgpack.packb(self._handle)
        await loop.sock_sendall(connection, _IPC_GREETING.pack(_IPC_NAME, len(handle)) + handle)
        name, size = _IPC_GREETING.unpack(await read_exactly(connection, _IPC_GREETING.size))
        if name != _IPC_NAME or size > _MAX_HANDLE_BYTES:
            raise EOFError("the peer speaks another protocol")
        theirs = await read_exactly(connection, size)
        try:
            unpacked = msgpack.unpackb(theirs)
        except (ValueError, msgpack.UnpackException):
            raise EOFError("the peer's handle is malformed") from None
        return await in_thread("kv-ipc-open", lambda: self._opened(unpacked))
