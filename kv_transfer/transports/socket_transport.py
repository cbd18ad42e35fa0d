"""What transports on stream sockets do in the same way: accept connections, greet, keep their links."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from core.errors import PeerLost, TransferError, TransferTimeout
from core.handoff import KVEndpoint
from kv_transfer.base import KVLink, KVTransport
from kv_transfer.transports.socket_link import SocketLink

_BACKLOG = 128
_log = logging.getLogger(__name__)


class SocketTransport(KVTransport):
    """``timeout_s`` bounds a greeting, and a send that makes no progress."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._accepted: asyncio.Queue[SocketLink | None] = asyncio.Queue()
        self._links: list[SocketLink] = []
        self._server: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @abstractmethod
    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> SocketLink:
        """Make sure that the other end is one of us, and make a link. OSError, EOFError or TransferError if not."""

    def _serve(self, server: socket.socket) -> None:
        """Accept connections on a bound socket, for as long as the transport is open."""
        server.listen(_BACKLOG)
        server.setblocking(False)
        self._server = server
        self._spawn(self._accept(server))

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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(link.aclose() for link in self._links))
        self._links.clear()

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(server)
            except OSError as error:  # the peer has left the queue again, or no descriptor is free
                _log.warning("a connection could not be accepted: %s (%s)", error, self.name)
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._receive(connection, str(address)))

    async def _receive(self, connection: socket.socket, peer: str) -> None:
        link: SocketLink | None = None
        try:
            connection.setblocking(False)
            async with asyncio.timeout(self._timeout_s):
                link = await self._greet(connection, peer, connecting=False)
            self._accepted.put_nowait(self._keep(link))
        except (OSError, EOFError, TimeoutError, TransferError) as error:
            _log.warning("a peer's connection was given up: %s (%s)", error or "it timed out", self.name)
        finally:
            if link is None:
                connection.close()

    def _keep(self, link: SocketLink) -> SocketLink:
        self._links = [*(other for other in self._links if not other.closed), link]
        return link

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
