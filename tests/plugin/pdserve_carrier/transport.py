"""A transport whose payloads travel over streams of asyncio, within memory of their own."""

from __future__ import annotations

import asyncio
import socket
import struct

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, NOTHING, KVLink, check_sizes
from kv_transfer.fetch import Payload
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import MAX_HELLO_BYTES
from kv_transfer.transports.inbox import InboxLink
from kv_transfer.transports.socket_transport import SocketTransport
from pdserve.core.address import join_address, split_address
from pdserve.core.errors import ConfigError, PeerLost, TransferError, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret

_SIZES = struct.Struct("<IQ")  # of header and payload, before each message


class CarrierLink(InboxLink):
    """A link over a stream, which a task reads. ``timeout_s`` bounds a send."""

    def __init__(
        self, memory: Memory, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
    ) -> None:
        super().__init__("carrier", memory)
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._reading = asyncio.create_task(self._read())

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        size = check_sizes(header, payload)
        try:
            self._writer.write(b"".join((_SIZES.pack(len(header), size), header, *payload.parts)))
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise TransferTimeout(f"the peer took nothing for {self._timeout_s} s (carrier)") from None
        except OSError as error:
            raise PeerLost(f"{error} (carrier)") from None

    def cut(self, why: str) -> None:
        self._end(PeerLost(f"{why} (carrier)"))
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._reading.cancel()
        self._end(PeerLost("the link was closed here (carrier)"), discard=True)
        self._writer.close()
        self.introduced()
        self.on_closed(self)

    async def _read(self) -> None:
        try:
            while True:
                header, size = _SIZES.unpack(await self._reader.readexactly(_SIZES.size))
                pending = self._pending_peer is not None
                if header > (MAX_HELLO_BYTES if pending else MAX_HEADER_BYTES) or size > MAX_PAYLOAD_BYTES * (
                    not pending
                ):
                    return self.cut(f"the peer announced a message of {header} + {size} bytes")
                await self._put((await self._reader.readexactly(header), await self._reader.readexactly(size)))
        except (OSError, asyncio.IncompleteReadError, TransferError):
            self._end(PeerLost("the peer closed the link (carrier)"))


class CarrierTransport(SocketTransport):
    """Listens on a TCP port. It cannot encrypt."""

    name = "carrier"
    note = ", of a plug-in"

    def __init__(
        self, memory: Memory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        if tls is not None:
            raise ConfigError("transfer.transport: carrier cannot encrypt (cluster.tls_cert)")
        super().__init__(memory, secret, timeout_s=timeout_s)

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        server = socket.create_server((host, port))
        return self._serve(server, join_address(host, server.getsockname()[1]))

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        return await self._open(socket.socket(), split_address(endpoint.address), endpoint, timeout_s)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        reader, writer = await asyncio.open_connection(sock=connection)
        return CarrierLink(self._memory, reader, writer, self._timeout_s)
