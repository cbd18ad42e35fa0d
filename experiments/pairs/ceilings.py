"""The ceilings of transports: source and target of the pairs `memcpy`, `socket` and `torch_send`, as a program:
`python -m experiments.pairs.ceilings KIND [DEVICE] ROLE MAX_BYTES`."""

from __future__ import annotations

import ctypes
import importlib
import socket
import sys
import time
from typing import Any

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


class TorchEndpoint(Endpoint):
    """Sends or receives whole messages, as many at a time as there are. The source is rank 0, and has the store."""

    def __init__(self, role: str, max_bytes: int, kind: str, device: str) -> None:
        self.role, self._rank = role, int(role == "target")
        self._torch: Any = importlib.import_module("torch")
        self._device = device if device == "cpu" else f"{device}:{self._rank}"
        size = min(max_bytes, 64 * 2**20)
        zeros = self._torch.zeros(max_bytes // size * size, dtype=self._torch.uint8, device=self._device)
        self._messages = zeros.split(size)
        self._store = self._store_at(0) if role == "source" else None

    def _store_at(self, port: int) -> Any:
        master = self.role == "source"
        return self._torch.distributed.TCPStore("127.0.0.1", port, is_master=master, wait_for_workers=False)

    @property
    def address(self) -> int:
        """The store's port; the target has none."""
        return int(self._store.port) if self._store else 0

    def connect(self, address: bytes) -> None:
        """Join the group, which waits for the other side."""
        store = self._store or self._store_at(message_of(address, int, "the source"))
        where: dict[str, Any] = {}
        if self._device != "cpu":
            self._torch.cuda.set_device(self._device)
            where["device_id"] = self._torch.device(self._device)
        backend = "gloo" if self._device == "cpu" else "nccl"
        self._torch.distributed.init_process_group(backend, store=store, rank=self._rank, world_size=2, **where)

    def transfer(self, num_bytes: int) -> float:
        """Send or receive everything: when the source began, or when the target had everything."""
        distributed = self._torch.distributed
        if self.role == "target":
            self.answer(Expecting())
        started_s = time.perf_counter()
        move = distributed.irecv if self._rank else distributed.isend
        for work in [move(each, 1 - self._rank) for each in self._messages]:
            if work is not None:
                work.wait()
        if self._device != "cpu":
            self._torch.cuda.synchronize()
        return time.perf_counter() if self._rank else started_s


KINDS: dict[str, type[Endpoint]] = {"memcpy": MemcpyEndpoint, "socket": SocketEndpoint, "torch": TorchEndpoint}

if __name__ == "__main__":
    KINDS[sys.argv[1]].run()
