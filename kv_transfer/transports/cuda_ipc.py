"""Transport between workers that use the same GPU: the receiver copies out of the sender's pool, which it has opened by
CUDA IPC, into its own; nothing leaves the device. A Unix socket carries the messages and, once, each end's handle."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kv_transfer.memory import DeviceMemory
from kv_transfer.transports.greeting import read_exactly
from kv_transfer.transports.sharing_link import SharingLink
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.threads import in_thread
from kv_transfer.transports.unix_socket import UnixSocketTransport

_GREETING = struct.Struct("<16sI")  # what this is, the handle's length
_NAME = b"pdserve-kv/ipc/1"
_MAX_HANDLE_BYTES = 4096


class CudaIpcTransport(UnixSocketTransport):
    """For pools on the GPU ``gpu`` (its UUID). ``opened`` is `DeviceMemory.open`, or what stands for it in tests."""

    name = "cuda_ipc"

    def __init__(
        self,
        memory: DeviceMemory,
        gpu: str,
        *,
        timeout_s: float = 10.0,
        opened: Callable[[Sequence[Any]], DeviceMemory] = DeviceMemory.open,
    ) -> None:
        super().__init__(memory, gpu, timeout_s=timeout_s)
        self._handle, self._opened = memory.handle, opened

    async def _share(self, connection: socket.socket, peer: str) -> SocketLink:
        loop = asyncio.get_running_loop()
        handle: bytes = msgpack.packb(self._handle)
        await loop.sock_sendall(connection, _GREETING.pack(_NAME, len(handle)) + handle)
        name, size = _GREETING.unpack(await read_exactly(connection, _GREETING.size))
        if name != _NAME or size > _MAX_HANDLE_BYTES:
            raise EOFError("the peer speaks something else")
        theirs = await read_exactly(connection, size)
        try:
            unpacked = msgpack.unpackb(theirs)
        except (ValueError, msgpack.UnpackException):
            raise EOFError("the peer's handle is none") from None
        memory = await in_thread("kv-ipc-open", lambda: self._opened(unpacked))
        stream = SocketStream(connection, peer, self.name, self._timeout_s)
        return SharingLink(self.name, self._memory, stream, memory, on_device=True)


def gpu_of(memory: DeviceMemory) -> str:
    """The UUID of the GPU it lies on, the same in all processes."""
    import torch

    return str(torch.cuda.get_device_properties(memory.index).uuid)
