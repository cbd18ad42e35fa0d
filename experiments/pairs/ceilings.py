"""The ceilings of transports: source and target of the pairs `memcpy`, `socket` and `torch_send`, as a program:
`python -m experiments.pairs.ceilings KIND [DEVICE] ROLE MAX_BYTES`."""

from __future__ import annotations

import ctypes
import importlib
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.messages import say
from experiments.pairs.endpoint import Endpoint, Expecting, Reader, fill, shared


class MemcpyEndpoint(Reader):
    """The target copies with libc's memcpy from memory of its own, which has the same bytes as the source's."""

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """Memory to copy from, and to copy to."""
        self._original = fill(shared(num_bytes if self.role == "target" else 1), "source")
        return super().allocated(num_bytes, kind)

    def reader(self, num_bytes: int) -> Callable[[], object]:
        """A copy."""
        return partial(ctypes.memmove, self.memory.ctypes.data, self._original.ctypes.data, num_bytes)


class SocketEndpoint(Endpoint):
    """The source writes its memory to the socket, the target reads right into its own. The target listens, the source
    connects to it. Nothing here has a timeout: sockets with one are not blocking sockets to Python, which then polls
    before each call; the end of the program's input ends every wait."""

    pinned = True

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """The socket as well."""
        self._socket = socket.create_server(("127.0.0.1", 0)) if self.role == "target" else socket.socket()
        self.address = self._socket.getsockname()
        return super().allocated(num_bytes, kind)

    def connect(self, address: list[Any]) -> None:
        """One connection, which the source's call makes and the target's accepts."""
        if self.role == "source":
            self._socket.connect(tuple(address))
        else:
            listener, (self._socket, _) = self._socket, self._socket.accept()
            listener.close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self, num_bytes: int) -> float:
        """Write, or read: when the source began, or when the target had everything, by the host's clock."""
        data = self.memory.data[:num_bytes]
        if self.role == "source":
            started_s = time.perf_counter()
            self._socket.sendall(data)
            return started_s
        say(Expecting())
        while data:
            read = self._socket.recv_into(data)
            if not read:
                raise ConnectionError("the other side closed the connection")
            data = data[read:]
        return time.perf_counter()


class TorchEndpoint(Endpoint):
    """Sends or receives whole messages, as many at a time as there are. The source is rank 0, and has the store."""

    def allocated(self, num_bytes: int, kind: str) -> Any:
        """Messages on the device of this side; no bytes that can be compared."""
        self._torch: Any = importlib.import_module("torch")
        self._rank = int(self.role == "target")
        self._device = kind if kind == "cpu" else f"{kind}:{self._rank}"
        if self.role == "source":
            self.address = self._store_at(0).port
        size = min(num_bytes, 64 * 2**20)
        return self._torch.zeros(num_bytes // size * size, dtype=self._torch.uint8, device=self._device).split(size)

    def _store_at(self, port: int) -> Any:
        master = self.role == "source"
        self._store = self._torch.distributed.TCPStore("127.0.0.1", port, is_master=master, wait_for_workers=False)
        return self._store

    def connect(self, address: int) -> None:
        """Join the group, which waits for the other side."""
        if self.role == "target":
            self._store_at(address)
        where: dict[str, Any] = {"backend": "gloo"}
        if self._device != "cpu":
            self._torch.cuda.set_device(self._device)
            where = {"backend": "nccl", "device_id": self._torch.device(self._device)}
        self._torch.distributed.init_process_group(store=self._store, rank=self._rank, world_size=2, **where)

    def transfer(self, num_bytes: int) -> float:
        """Send or receive everything: when the source began, or when the target had everything."""
        distributed = self._torch.distributed
        if self.role == "target":
            say(Expecting())
        started_s = time.perf_counter()
        move = distributed.irecv if self._rank else distributed.isend
        for work in [move(each, 1 - self._rank) for each in self.memory]:
            if work is not None:
                work.wait()
        if self._device != "cpu":
            self._torch.cuda.synchronize()
        return time.perf_counter() if self._rank else started_s


if __name__ == "__main__":
    {"memcpy": MemcpyEndpoint, "socket": SocketEndpoint, "torch": TorchEndpoint}[sys.argv.pop(1)].run()
