"""Transport between processes of one host: payloads in the sender's pool are not sent at all, the receiver copies them
out of its own mapping of that pool, straight into its blocks. A Unix socket carries the messages and, once, the
descriptor of each end's memory file."""

from __future__ import annotations

import array
import os
import socket

from kv_transfer.shared_memory import PeerMemory, SharedMemory
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.threads import in_thread
from kv_transfer.transports.unix_socket import UnixSocketTransport, ready

_GREETING = b"pdserve-kv/shm/1"


class ShmTransport(UnixSocketTransport):
    """``memory`` is this worker's pool; without it (a pool that lies on a device) payloads travel over the socket."""

    name = "shm"

    def __init__(self, memory: SharedMemory | None = None, *, timeout_s: float = 10.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._memory = memory

    async def _share(self, connection: socket.socket, peer: str) -> SocketLink:
        # Opened again, for reading alone: nobody but its owner writes a pool.
        fds = [] if self._memory is None else [os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY)]
        try:
            await ready(lambda: socket.send_fds(connection, [_GREETING], fds), connection, writing=True)
        finally:
            for fd in fds:
                os.close(fd)
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
        return SocketLink(self.name, SocketStream(connection, peer, self.name, self._timeout_s), self._memory, memory)
