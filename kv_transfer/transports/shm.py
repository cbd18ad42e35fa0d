"""Transport between processes of one host: payloads in the sender's pool are not sent at all, the receiver copies them
out of its own mapping of that pool, straight into its blocks. A Unix socket carries the messages and, once, the
descriptor of each end's memory file."""

from __future__ import annotations

import array
import os
import socket

from kv_transfer.memory import HostMemory
from kv_transfer.transports.sharing_link import SharingLink
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.threads import in_thread
from kv_transfer.transports.unix_socket import UnixSocketTransport, ready

_GREETING = b"pdserve-kv/shm/1"


class ShmTransport(UnixSocketTransport):
    """For pools in memory files."""

    name = "shm"

    def __init__(self, memory: HostMemory, *, timeout_s: float = 10.0) -> None:
        super().__init__(memory, timeout_s=timeout_s)
        self._fd = memory.fd

    async def _share(self, connection: socket.socket, peer: str) -> SocketLink:
        # Opened again, for reading alone: only its owner writes a pool.
        readable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)
        try:
            await ready(lambda: socket.send_fds(connection, [_GREETING], [readable]), connection, writing=True)
        finally:
            os.close(readable)
        greeting, ancillary, _, _ = await ready(
            lambda: connection.recvmsg(len(_GREETING), socket.CMSG_SPACE(4)), connection, writing=False
        )
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        try:
            if greeting != _GREETING:
                raise EOFError("the peer speaks something else" if greeting else "the peer closed the connection")
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
        return SharingLink(self.name, self._memory, SocketStream(connection, peer, self.name, self._timeout_s), memory)
