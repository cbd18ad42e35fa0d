"""Transport between processes of one host. Each end maps the other's memory file, whose descriptor travels once over a
Unix socket. The receiver copies payloads from the sender's pool directly into its own blocks."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from kv_transfer.memory import HostMemory
from kv_transfer.transports.unix_socket import UnixSocketTransport
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

_GREETING = b"pdserve-kv/shm/1"

T = TypeVar("T")


class ShmTransport(UnixSocketTransport):
    """For pools in memory files."""

    name = "shm"

    def __init__(self, memory: HostMemory, secret: ServiceSecret, *, timeout_s: float = 10.0) -> None:
        super().__init__(memory, secret, timeout_s=timeout_s)
        self._fd = memory.fd

    async def _share(self, connection: socket.socket) -> HostMemory:
        # The peer gets a read-only descriptor: only the owner of a pool writes to it.
        readable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)
        try:
            await _ready(lambda: socket.send_fds(connection, [_GREETING], [readable]), connection, writing=True)
        finally:
            os.close(readable)
        greeting, ancillary, _, _ = await _ready(
            lambda: connection.recvmsg(len(_GREETING), socket.CMSG_SPACE(4)), connection, writing=False
        )
        received = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        try:
            if greeting != _GREETING:
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


async def _ready(call: Callable[[], T], connection: socket.socket, *, writing: bool) -> T:
    """Call ``call`` as soon as the socket is ready for it, and return its result."""
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
