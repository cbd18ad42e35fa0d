"""Transport by NIXL with its UCX backend. The receiver reads payloads from the sender's pool into its own, on hosts or
GPUs, by RDMA if available. Messages travel over a TCP connection per link.

Once both ends are proven, they exchange the metadata of their agents and the addresses of their registered memory. Each
can then read the other's whole pool, so the hosts of the network must trust each other.
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
from kv_transfer.transports.socket_proof import read_exactly
from kv_transfer.transports.socket_stream import SocketStream
from kv_transfer.transports.tcp import TcpTransport, tune
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from runtime.threads import in_thread

_ABOUT = struct.Struct(f"<{NAME_BYTES}sQQiI")  # agent; its memory: address, size, device (-1: host); bytes of metadata
_MAX_METADATA_BYTES = 256 * 2**10
_WATCH_S = 0.01


class NixlTransport(TcpTransport):
    """``timeout_s`` also bounds the read of a piece."""

    name = "nixl"
    encrypts = False

    def __init__(
        self, memory: Memory, secret: ServiceSecret, *, tls: PlaneTls | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(memory, secret, tls=tls, timeout_s=timeout_s)
        self._making: asyncio.Task[NixlAgent] | None = None
        self._left: dict[Any, tuple[str, Fetch]] = {}  # reads in progress whose links are lost
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections. NIXL picks its own ports. ConfigError without NIXL."""
        await self._agent()
        return await super().listen(host, port)

    async def aclose(self) -> None:
        """Stop listening, close every link, and close the agent, which ends all reads."""
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
        """The agent, created by the first call. A cancelled call does not stop the creation. ConfigError if it
        fails."""
        if self._making is None:
            self._making = asyncio.create_task(in_thread("kv-nixl", lambda: NixlAgent(self._memory)))
        return await asyncio.shield(self._making)

    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> NixlLink:
        tune(connection)
        # The end that connected sends first: if both sent at once, large metadata might fill the sockets' buffers.
        agent = await self._agent()
        if connecting:
            await self._introduce(connection, agent)
        name, address, size, device, metadata_bytes = _ABOUT.unpack(await read_exactly(connection, _ABOUT.size))
        if metadata_bytes > _MAX_METADATA_BYTES:
            raise EOFError(f"the peer announced {metadata_bytes} bytes of metadata")
        metadata = await read_exactly(connection, metadata_bytes)
        if not connecting:
            await self._introduce(connection, agent)
        other = RemoteMemory(name.decode("ascii", "replace"), address, size, max(device, 0))
        if (device < 0) == self._memory.on_device:
            raise EOFError("one pool is on a GPU, and the other one on a host")
        agent.add_peer(other.agent, metadata)
        stream = SocketStream(connection, peer, self.name, self._timeout_s)
        return NixlLink(self.name, self._memory, stream, agent, other, leave=self._leave, timeout_s=self._timeout_s)

    async def _introduce(self, connection: socket.socket, agent: NixlAgent) -> None:
        memory = self._memory
        device = memory.index if isinstance(memory, DeviceMemory) else -1
        about = _ABOUT.pack(agent.name.encode(), memory.address, memory.size, device, len(agent.metadata))
        await asyncio.get_running_loop().sock_sendall(connection, about + agent.metadata)

    def _leave(self, agent: NixlAgent, peer: str, handle: Any, fetch: Fetch) -> None:
        """Watch a read whose link is lost until it ends, because it still writes its regions. The peer must stay known
        to NIXL until then."""
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
                except PeerLost:  # the state is unknown: the read may write until the agent is closed
                    ended = False
                if ended:
                    del self._left[handle]
                    agent.remove_peer(peer)
                    fetch.end_writing()
            await asyncio.sleep(_WATCH_S)
