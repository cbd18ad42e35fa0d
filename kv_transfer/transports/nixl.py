"""Transport by NIXL (with its UCX backend): the receiver reads payloads out of the sender's pool into its own, on hosts
or on GPUs, with RDMA where there is any. Messages go over a TCP connection per link.

When two ends meet they tell each other their agent's metadata and where their registered memory lies; from then on each
can read the other's pool, so that this is for networks whose hosts trust each other.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from kv_transfer.fetch import Fetch
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.transports.nixl_agent import NAME_BYTES, NixlAgent, ReadFailed, RemoteMemory
from kv_transfer.transports.nixl_link import NixlLink
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.socket_transport import expect_greeting, read_exactly
from kv_transfer.transports.tcp import TcpTransport, tune
from kv_transfer.transports.threads import in_thread
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint

_GREETING = b"pdserve-kv/nixl/2"
_ABOUT = struct.Struct(f"<{NAME_BYTES}sQQiI")  # agent; its memory: address, size, device (-1: host); bytes of metadata
_MAX_METADATA_BYTES = 256 * 2**10
_WATCH_S = 0.01


class NixlTransport(TcpTransport):
    """``timeout_s`` bounds the read of a piece, too."""

    name = "nixl"

    def __init__(self, memory: Memory, *, timeout_s: float = 10.0) -> None:
        super().__init__(memory, timeout_s=timeout_s)
        self._making: asyncio.Task[NixlAgent] | None = None
        self._left: dict[Any, tuple[str, Fetch]] = {}  # reads that outlived their links
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections; ConfigError without NIXL. What NIXL itself listens on, it picks."""
        await self._agent()
        return await super().listen(host, port)

    async def aclose(self) -> None:
        """Stop listening, close every link, end the agent, and all reads with it."""
        await super().aclose()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        making, self._making = self._making, None
        if making is not None:
            await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                await in_thread("kv-nixl-close", making.result().close)
        for _, fetch in self._left.values():
            fetch.end_writing()
        self._left.clear()

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
        name, address, size, device, metadata_bytes = _ABOUT.unpack(await read_exactly(connection, _ABOUT.size))
        if metadata_bytes > _MAX_METADATA_BYTES:
            raise EOFError(f"the peer announced {metadata_bytes} bytes of metadata")
        metadata = await read_exactly(connection, metadata_bytes)
        if not connecting:
            await self._introduce(connection, agent)
        other = RemoteMemory(name.decode("ascii", "replace"), address, size, max(device, 0))
        if (device < 0) == self._memory.on_device:
            raise EOFError("one pool is on a GPU, and the other one is not")
        agent.add_peer(other.agent, metadata)
        stream = SocketStream(connection, peer, self.name, self._timeout_s)
        return NixlLink(self.name, self._memory, stream, agent, other, leave=self._leave, timeout_s=self._timeout_s)

    async def _introduce(self, connection: socket.socket, agent: NixlAgent) -> None:
        memory = self._memory
        device = memory.index if isinstance(memory, DeviceMemory) else -1
        about = _ABOUT.pack(agent.name.encode(), memory.address, memory.size, device, len(agent.metadata))
        await asyncio.get_running_loop().sock_sendall(connection, _GREETING + about + agent.metadata)

    def _leave(self, agent: NixlAgent, peer: str, handle: Any, fetch: Fetch) -> None:
        """A link is over and a read of it is not: its regions are written until the read has ended. NIXL knows that
        only while it knows the peer."""
        agent.hold_peer(peer)
        self._left[handle] = peer, fetch
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        agent = await self._agent()
        while self._left:
            for handle, (peer, fetch) in list(self._left.items()):
                try:
                    ended = agent.done(handle)
                except ReadFailed:
                    ended = True
                except PeerLost:  # not known: it may still write, until the agent ends
                    ended = False
                if ended:
                    del self._left[handle]
                    agent.remove_peer(peer)
                    fetch.end_writing()
            await asyncio.sleep(_WATCH_S)
