"""Transport over torch.distributed: Gloo on CPUs, NCCL on GPUs.

A TCP connection carries headers, and announces the size of each payload. Payloads travel as ``send``/``recv`` of a
process group that belongs to this link alone. So a receive is posted only for a payload that was announced, and a lost
peer shows as the end of the TCP connection. A link whose group fails is closed; the next connect builds another group.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from kv_transfer.base import MAX_HEADER_BYTES, KVLink
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.pending_peers import MAX_HELLO_BYTES
from kv_transfer.transports.tcp import TcpTransport, tune
from kv_transfer.transports.torch_link import FRAME, TorchDistLink
from pdserve.core.errors import ConfigError
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

if TYPE_CHECKING:
    from kv_transfer.transports.torch_groups import Backend, ExchangeStore, Groups

_GREETING: dict[Backend, bytes] = {"gloo": b"PDG1", "nccl": b"PDN1"}
_GREETING_BYTES = 4
_READ_AHEAD = 64 * 2**10
_MAX_KEYS = 64  # of the store; a group has a few
_LOOK_S = 0.1
_NCCL_JOIN_S = 90.0  # `torch_groups.JOIN_S`, which importing would import torch
_GROUPS_MODULE = "kv_transfer.transports.torch_groups"


class TorchDistTransport(TcpTransport):
    """Listens on a TCP port. ``timeout_s`` bounds one send or receive of a payload. ``backend`` defaults to
    NCCL for memory on a GPU, and ``on_device`` to whether the backend is NCCL."""

    name = "torch_dist"
    encrypts = False
    max_pending_peers = 16  # fewer than elsewhere: each has a thread that builds its groups

    def __init__(
        self,
        memory: Memory,
        secret: ServiceSecret,
        *,
        backend: Backend | None = None,
        tls: PlaneTls | None = None,
        timeout_s: float = 10.0,
        on_device: bool | None = None,
    ) -> None:
        super().__init__(memory, secret, tls=tls, timeout_s=timeout_s)
        self._backend: Backend = backend or ("nccl" if memory.on_device else "gloo")
        self._on_device = self._backend == "nccl" if on_device is None else on_device
        self._index = memory.index if isinstance(memory, DeviceMemory) else 0
        self._greet_s = _NCCL_JOIN_S if self._backend == "nccl" else 0.0

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections. The groups of each link use ports that the system picks."""
        await _import_groups()
        return await super().listen(host, port)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a connection and join the groups. ConfigError if the peer uses another backend."""
        await _import_groups()
        return await super().connect(endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        tune(connection)
        limit = _READ_AHEAD if connecting else MAX_HELLO_BYTES
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        link: TorchDistLink | None = None
        try:
            writer.write(_GREETING[self._backend])
            if await reader.readexactly(_GREETING_BYTES) != _GREETING[self._backend]:
                if connecting:
                    raise ConfigError(f"transfer.transport: torch_dist uses {self._backend} here but not at {peer}")
                raise EOFError("the peer speaks another protocol")
            link = await self._join(reader, writer, rank=int(connecting))
            return link
        finally:
            if link is None:
                writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int) -> TorchDistLink:
        """Build the groups in a thread while the keys of their store travel over the connection. An empty key marks the
        end of the keys."""
        loop = asyncio.get_running_loop()
        connection: socket.socket = writer.get_extra_info("socket")
        hosts = connection.getsockname()[0], connection.getpeername()[0]
        module = await _import_groups()

        def publish(key: bytes, value: bytes) -> None:
            loop.call_soon_threadsafe(writer.write, FRAME.pack(len(key), len(value)) + key + value)

        def build() -> Groups:
            groups: Groups = module.create_groups(
                self._backend, store, rank, hosts, self._timeout_s, on_device=self._on_device, index=self._index
            )
            publish(b"", b"")
            made.append(groups)
            if abandoned.is_set():
                raise RuntimeError("the peer left")
            groups.connect()
            return groups

        made: list[Groups] = []
        abandoned = threading.Event()

        store: ExchangeStore = module.ExchangeStore(publish, max(self._timeout_s, self._greet_s))
        joined = False
        joining = asyncio.gather(in_thread("kv-torch-join", build), _take_keys(reader, store))
        joining.add_done_callback(lambda done: done.cancelled() or done.exception())
        leaving = asyncio.create_task(_left(reader))
        try:
            waiting: list[asyncio.Future[Any]] = [joining, leaving]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise EOFError("the peer left while the two joined")
            groups, _ = joining.result()
            joined = True
        finally:
            leaving.cancel()
            joining.cancel()
            store.close()
            if not joined:  # nothing else ends the thread that connects
                abandoned.set()
                for each in made:
                    each.abort()
        return TorchDistLink(self._memory, reader, writer, groups, self._timeout_s, on_device=self._on_device)


async def _import_groups() -> Any:
    """The module `torch_groups`. Importing torch takes seconds, which must not count towards a peer's timeout."""
    if _GROUPS_MODULE not in sys.modules:
        await in_thread("kv-torch-import", lambda: importlib.import_module(_GROUPS_MODULE))
    return importlib.import_module(_GROUPS_MODULE)


async def _left(reader: asyncio.StreamReader) -> None:
    """Return when the peer has closed or reset the connection, without reading from it."""
    while not (reader.at_eof() or reader.exception()):  # noqa: ASYNC110 - a stream has no event for it
        await asyncio.sleep(_LOOK_S)


async def _take_keys(reader: asyncio.StreamReader, store: ExchangeStore) -> None:
    left = MAX_HEADER_BYTES
    for _ in range(_MAX_KEYS):
        key_size, size = FRAME.unpack(await reader.readexactly(FRAME.size))
        if not key_size:
            return
        left -= key_size + size
        if left < 0:
            raise OSError(f"the peer sent a key of {key_size} + {size} bytes; all keys have {MAX_HEADER_BYTES} at most")
        key = await reader.readexactly(key_size)
        store.receive(key.decode(errors="replace"), await reader.readexactly(size))
    raise OSError(f"the peer sent more than {_MAX_KEYS} keys")
