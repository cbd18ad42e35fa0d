"""Transport by NIXL (with its UCX backend): payloads in the sender's pool are read out of it by the receiver, with RDMA
where there is any. Messages, and payloads that lie elsewhere, go over a TCP connection per link.

When two ends meet they tell each other their agent's metadata and where their registered memory lies; from then on each
can read the other's pool, so that this is for networks whose hosts trust each other.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from kv_transfer.shared_memory import SharedMemory
from kv_transfer.transports.greeting import expect_greeting, read_exactly
from kv_transfer.transports.nixl_agent import NAME_BYTES, NixlAgent
from kv_transfer.transports.nixl_link import NixlLink, NixlPeer
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.tcp import TcpTransport, tune
from kv_transfer.transports.threads import in_thread
from pdserve.core.handoff import KVEndpoint

_GREETING = b"pdserve-kv/nixl/1"
_ABOUT = struct.Struct(f"<{NAME_BYTES}sQQI")  # agent, address and size of its memory, bytes of metadata that follow
_MAX_METADATA_BYTES = 256 * 2**10


class NixlTransport(TcpTransport):
    """``memory`` is this worker's pool; without it (a pool that lies on a device) payloads travel over TCP.
    ``timeout_s`` bounds the read of a piece, too."""

    name = "nixl"

    def __init__(self, memory: SharedMemory | None = None, *, timeout_s: float = 10.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self._memory = memory
        self._making: asyncio.Task[NixlAgent] | None = None

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections; ConfigError without NIXL. What NIXL itself listens on, it picks."""
        await self._agent()
        return await super().listen(host, port)

    async def aclose(self) -> None:
        """Stop listening, close every link, end the agent."""
        await super().aclose()
        making, self._making = self._making, None
        if making is not None:
            await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                await in_thread("kv-nixl-close", making.result().close)

    async def _agent(self) -> NixlAgent:
        """This transport's agent, made by the first who asks; ConfigError if none can be. A caller who gives up does
        not end the making: the next one needs it as well."""
        if self._making is None:
            self._making = asyncio.create_task(in_thread("kv-nixl", lambda: NixlAgent(self._memory)))
        return await asyncio.shield(self._making)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> NixlLink:
        tune(connection)
        # The end that connected speaks first: metadata of many devices might not fit into the sockets' buffers.
        agent = await self._agent()
        if connecting:
            await self._introduce(connection, agent)
        await expect_greeting(connection, _GREETING)
        name, address, size, metadata_bytes = _ABOUT.unpack(await read_exactly(connection, _ABOUT.size))
        if metadata_bytes > _MAX_METADATA_BYTES:
            raise EOFError(f"the peer announced {metadata_bytes} bytes of metadata")
        metadata = await read_exactly(connection, metadata_bytes)
        if not connecting:
            await self._introduce(connection, agent)
        other = NixlPeer(name.decode("ascii", "replace"), address, size)
        agent.add_peer(other.name, metadata)
        stream = SocketStream(connection, peer, self.name, self._timeout_s)
        return NixlLink(self.name, stream, agent, self._memory, other, timeout_s=self._timeout_s)

    async def _introduce(self, connection: socket.socket, agent: NixlAgent) -> None:
        memory = (0, 0) if self._memory is None else (self._memory.address, self._memory.size)
        about = _ABOUT.pack(agent.name.encode(), *memory, len(agent.metadata))
        await asyncio.get_running_loop().sock_sendall(connection, _GREETING + about + agent.metadata)
