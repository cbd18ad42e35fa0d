"""The ceilings of transports: source and target of the pairs `memcpy` and `socket`, as a program:
`python -m experiments.pairs.ceilings KIND ROLE MAX_BYTES`."""

from __future__ import annotations

import ctypes
import socket
import sys
import time

from experiments.messages import message_of
from experiments.pairs.endpoint import Buffer, Endpoint, Expecting, pin


class MemcpyEndpoint(Endpoint):
    """The target copies with libc's memcpy from a buffer of its own, which has the same bytes as the source's."""

    def __init__(self, role: str, max_bytes: int, *arguments: str) -> None:
        super().__init__(role, max_bytes)
        self._original = Buffer(max_bytes if role == "target" else 1, filled=True)

    @property
    def address(self) -> None:
        """Nothing."""

    def connect(self, address: bytes) -> None:
        """Nothing."""

    def transfer(self, num_bytes: int) -> float:
        """Copy: the seconds it takes."""
        if self.role == "source":
            self.answer(Expecting())
            return 0.0
        target_address, source_address = self.buffer.address, self._original.address
        started_s = time.perf_counter()
        ctypes.memmove(target_address, source_address, num_bytes)
        return time.perf_counter() - started_s


class SocketEndpoint(Endpoint):
    """The source writes its buffer to the socket, the target reads right into its own. The target listens, the source
    connects to it. Nothing here has a timeout: sockets with one are not blocking sockets to Python, which then polls
    before each call; the end of the program's input ends every wait."""

    def __init__(self, role: str, max_bytes: int, *arguments: str) -> None:
        pin(role)
        super().__init__(role, max_bytes)
        self._socket = socket.create_server(("127.0.0.1", 0)) if role == "target" else socket.socket()

    @property
    def address(self) -> int:
        """The target's port; the source has none."""
        return int(self._socket.getsockname()[1]) if self.role == "target" else 0

    def connect(self, address: bytes) -> None:
        """One connection, which the source's call makes and the target's accepts."""
        if self.role == "source":
            self._socket.connect(("127.0.0.1", message_of(address, int, "the target")))
        else:
            listener, (self._socket, _) = self._socket, self._socket.accept()
            listener.close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self, num_bytes: int) -> float:
        """Write, or read: when the source began, or when the target had everything, by the host's clock."""
        data = self.buffer.view[:num_bytes]
        if self.role == "target":
            self.answer(Expecting())
        at_s = time.perf_counter()
        if self.role == "source":
            self._socket.sendall(data)
            return at_s
        while data:
            read = self._socket.recv_into(data)
            if not read:
                raise ConnectionError("the other side closed the connection")
            data = data[read:]
        return time.perf_counter()


if __name__ == "__main__":
    {"memcpy": MemcpyEndpoint, "socket": SocketEndpoint}[sys.argv[1]].run()
