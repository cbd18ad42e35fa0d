"""Something between two ends of a TCP connection that can cut it, stall it, or record it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

from kv_transfer.base import KVTransport
from kv_transfer.transports.grpc_stream import GrpcStreamTransport
from kv_transfer.transports.socket_transport import SocketTransport

_CHUNK = 64 * 2**10


def known_as(transport: KVTransport, address: str) -> None:
    """Have a transport that listens prove itself as the one at ``address``, the relay's: proofs are worth nothing at
    another address than the one that was dialled."""
    if isinstance(transport, GrpcStreamTransport):
        assert transport._proofs is not None
        transport._proofs.address = address
    else:
        assert isinstance(transport, SocketTransport)
        transport.address = address


class Relay:
    """Forwards connections on ``address`` to ``target`` (``host:port`` both) in a thread, until `close`. ``seen`` has
    what came from the end that connected, if ``record``."""

    def __init__(self, target: str, *, record: bool = False) -> None:
        self.seen = bytearray()
        self._record = record
        host, _, port = target.rpartition(":")
        self.target, self._host, self._port = target, host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._left: int | None = None
        self._closed = False
        self._thread("relay-accept", self._accept)

    def stall(self, after_bytes: int) -> None:
        """Forward so many bytes more from the end that connected, then nothing until `flow`."""
        with self._lock:
            self._left = after_bytes

    def flow(self) -> None:
        """Go on."""
        with self._lock:
            self._left = None
        self._flowing.set()

    def cut(self) -> None:
        """End all connections, at both ends."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for connection in pair:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.flow()

    def close(self) -> None:
        """End it all."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in list(self._threads):
            thread.join(5)
            assert not thread.is_alive()
        self._server.close()

    def _thread(self, name: str, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self._host, self._port), 5)
            except OSError:
                near.close()
                continue
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far.settimeout(None)
            with self._lock:
                self._pairs.append((near, far))
            self._thread("relay", self._forward, near, far)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            try:
                while selector.get_map():
                    for key, _ in selector.select():
                        source, sink = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        data = source.recv(_CHUNK)
                        if not data:
                            selector.unregister(source)
                            sink.shutdown(socket.SHUT_WR)
                        elif source is far:
                            sink.sendall(data)
                        else:
                            self._pass(data, sink)
            except OSError:
                pass
            for connection in (near, far):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            with self._lock:
                if (near, far) in self._pairs:
                    self._pairs.remove((near, far))

    def _pass(self, data: bytes, sink: socket.socket) -> None:
        """Forward from the end that connected: what may pass now, the rest once it flows again."""
        with self._lock:
            if self._record:
                self.seen += data
            now = len(data)
            if self._left is not None:
                now = min(now, self._left)
                self._left -= now
                if now < len(data):
                    self._flowing.clear()
        sink.sendall(data[:now])
        if now < len(data):
            self._flowing.wait()
            sink.sendall(data[now:])
