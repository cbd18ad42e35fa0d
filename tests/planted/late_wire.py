"""A network whose answers are late: a TCP forwarder with a delay, in front of a server."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread


@contextlib.contextmanager
def late_wire(target: str, delay_s: float) -> Iterator[str]:
    """The ``host:port`` of a forwarder to the server at ``target``. Bytes to it pass at once; bytes from it arrive
    ``delay_s`` after they were sent, and later ones are under way meanwhile."""
    host, _, port = target.rpartition(":")

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                for ends, late_s in (((client, server), 0.0), ((server, client), delay_s)):
                    Thread(target=_pump, args=(*ends, late_s), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Pass bytes on until the end of ``source``, each ``delay_s`` after it was read; then end ``sink`` as well."""
    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    under_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def deliver() -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = under_way.get()
                time.sleep(max(0.0, due_s - time.monotonic()))
                if not data:
                    return sink.shutdown(socket.SHUT_RDWR)
                sink.sendall(data)

    Thread(target=deliver, daemon=True).start()
    with source, contextlib.suppress(OSError):
        while data := source.recv(2**16):
            under_way.put((time.monotonic() + delay_s, data))
    under_way.put((time.monotonic() + delay_s, b""))
