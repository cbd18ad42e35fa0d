"""Transport between workers that use the same GPU. Each end opens the other's pool by CUDA IPC, whose handle travels
once over a Unix socket. The receiver copies payloads on the device."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kv_transfer.memory import DeviceMemory
from kv_transfer.transports.socket_proof import read_exactly
from kv_transfer.transports.unix_socket import UnixSocketTransport
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

_GREETING = struct.Struct("<16sI")  # name of the protocol, length of the handle
_NAME = b"pdserve-kv/ipc/1"
_MAX_HANDLE_BYTES = 4096


class CudaIpcTransport(UnixSocketTransport):
    """For pools on the GPU with the UUID ``gpu``. ``opened`` opens a peer's handle."""

    name = "cuda_ipc"

    def __init__(
        self,
        memory: DeviceMemory,
        secret: ServiceSecret,
        gpu: str,
        *,
        timeout_s: float = 10.0,
        opened: Callable[[Sequence[Any]], DeviceMemory] | None = None,
    ) -> None:
        super().__init__(memory, secret, gpu, timeout_s=timeout_s)
        # The peer may see its GPU under another index; by its UUID it is the same as this end's.
        self._opened = opened or (lambda handle: DeviceMemory.open(handle, memory.index, memory.cuda))
        self._handle = memory.handle

    async def _share(self, connection: socket.socket) -> DeviceMemory:
        loop = asyncio.get_running_loop()
        handle: bytes = msgpack.packb(self._handle)
        await loop.sock_sendall(connection, _GREETING.pack(_NAME, len(handle)) + handle)
        name, size = _GREETING.unpack(await read_exactly(connection, _GREETING.size))
        if name != _NAME or size > _MAX_HANDLE_BYTES:
            raise EOFError("the peer speaks another protocol")
        theirs = await read_exactly(connection, size)
        try:
            unpacked = msgpack.unpackb(theirs)
        except (ValueError, msgpack.UnpackException):
            raise EOFError("the peer's handle is malformed") from None
        return await in_thread("kv-ipc-open", lambda: self._opened(unpacked))


def gpu_of(memory: DeviceMemory) -> str:
    """The UUID of the GPU that the memory lies on, equal in all processes."""
    return "" if memory.cuda is None else memory.cuda.uuid(memory.index)
