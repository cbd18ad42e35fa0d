"""What transports on stream sockets do in the same way: accept connections, greet, keep their links."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod

from kv_transfer.base import KVLink, KVTransport
from kv_transfer.memory import Memory
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.socket_link import SocketLink
from kv_transfer.transports.strangers import Stranger, Strangers
from pdserve.core.errors import PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint


class SocketTransport(KVTransport):
    """``timeout_s`` bounds a send that makes no progress."""

    def __init__(self, memory: Memory, *, timeout_s: float = 10.0) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._accepted: asyncio.Queue[SocketLink | None] = asyncio.Queue()
        self._links: set[SocketLink] = set()
        self._acceptor: Acceptor | None = None
        self._closed = False

    @abstractmethod
    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> SocketLink:
        """Make sure that the other end is one of us, and make a link. OSError, EOFError or TransferError if not."""

    def _serve(self, server: socket.socket) -> None:
        """Accept connections on a bound socket, for as long as the transport is open."""
        self._acceptor = Acceptor(server, Strangers(self.name), self._welcome)

    async def accept(self) -> KVLink:
        """The next link a peer opened."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost(f"this transport is closed ({self.name})")
        return link

    async def _open(self, connection: socket.socket, address: object, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """A link over ``connection``, which is connected to ``address`` here."""
        link: SocketLink | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, address)  # type: ignore[arg-type]
                link = await self._greet(connection, endpoint.address, connecting=True)
        except TimeoutError:
            where = f"{endpoint.address} did not answer within {timeout_s} s ({self.name})"
            raise TransferTimeout(where) from None
        except (OSError, EOFError) as error:
            raise PeerLost(f"no link to {endpoint.address}: {error} ({self.name})") from None
        finally:
            if link is None:
                connection.close()
        return self._keep(link)

    async def aclose(self) -> None:
        """Stop listening, close every link."""
        self._closed = True
        self._accepted.put_nowait(None)
        if self._acceptor is not None:
            await self._acceptor.aclose()
        await asyncio.gather(*(link.aclose() for link in list(self._links)))

    async def _welcome(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        """See `acceptor.Welcome`."""
        link: SocketLink | None = None
        try:
            link = await self._greet(connection, peer, connecting=False)
        finally:
            if link is None:
                connection.close()
        link.strange(stranger)
        self._accepted.put_nowait(self._keep(link))

    def _keep(self, link: SocketLink) -> SocketLink:
        self._links.add(link)
        link.on_closed = self._links.discard
        return link
