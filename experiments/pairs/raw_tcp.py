"""The ceiling of network transports: one blocking loopback socket between two processes, source and target of which
are this module: `python -m experiments.pairs.raw_tcp ROLE MAX_BYTES`."""

from __future__ import annotations

import socket
import time

from experiments.messages import Message, message_of
from experiments.pairs.endpoint import Endpoint, Expecting, pin
from experiments.pairs.process_pair import ProcessPair


class RawTcp(ProcessPair):
    """The source writes its buffer to the socket, the target reads right into its own."""

    name = "tcp"
    module = "experiments.pairs.raw_tcp"


class Address(Message):
    """The target's port; the source has none."""

    port: int = 0


class RawTcpEndpoint(Endpoint):
    """The target listens, the source connects to it. Nothing here has a timeout: sockets with one are not blocking
    sockets to Python, which then polls before each call; the end of the program's input ends every wait."""

    def __init__(self, role: str, max_bytes: int) -> None:
        pin(role)
        super().__init__(role, max_bytes)
        self._socket = socket.create_server(("127.0.0.1", 0)) if role == "target" else socket.socket()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(self._socket.getsockname()[1] if self.role == "target" else 0)

    def connect(self, address: bytes) -> None:
        """One connection, which the source's call makes and the target's accepts."""
        if self.role == "source":
            self._socket.connect(("127.0.0.1", message_of(address, Address, "the target").port))
        else:
            listener, (self._socket, _) = self._socket, self._socket.accept()
            listener.close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self, num_bytes: int) -> float:
        """Write, or read and answer: when the source began, or when the target had everything, by the host's clock."""
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
    RawTcpEndpoint.run()
