"""A TCP socket with TLS that reads and writes as a plain, non-blocking socket does."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from runtime.plane_tls import SERVER_NAME, PlaneTls
from runtime.secret import Unproven

_CALL_BYTES = 2**20
"""How much one call moves at most, so that the caller can let other tasks run."""
_RECORD_BYTES = 2**14 + 2**9
"""More than a record has with its header and tag."""
_BLOCKED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
    """Shake hands on a connected, non-blocking socket, which the result replaces. `Unproven` if the peer has no
    certificate of the service or speaks no TLS, OSError if the connection breaks; both close it. Needs a timeout around
    it."""
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
        await _shake_hands(encrypted)
        shaken = True
    except ssl.SSLEOFError:
        raise EOFError("the peer closed the connection during the TLS handshake") from None
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason or str(error)
        raise Unproven(f"TLS failed: {why}") from None
    finally:
        if not shaken:
            encrypted.close()
    return encrypted


async def _shake_hands(encrypted: TlsSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return encrypted.do_handshake()
        except ssl.SSLWantReadError:
            await _ready(encrypted, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(encrypted, loop.add_writer, loop.remove_writer)


async def _ready(
    encrypted: TlsSocket, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object]
) -> None:
    ready, fd = asyncio.Event(), encrypted.fileno()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
