"""What transports on stream sockets share: they accept connections, exchange proofs with the peer, and keep their
links."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from kv_transfer.base import KVLink, KVTransport
from kv_transfer.memory import Memory
from kv_transfer.strangers import Stranger, Strangers
from kv_transfer.transports.socket_proof import prove_dialling, prove_listening
from pdserve.core.errors import PeerLost, TransferError, TransferRefused, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from runtime.secret import ServiceSecret, Unproven

_BACKLOG = 128
_RETRY_S = 0.1
_log = logging.getLogger(__name__)

Welcome = Callable[[socket.socket, str, Stranger], Coroutine[Any, Any, None]]
"""Makes a link of a connection with a peer. If it raises (OSError, EOFError, RuntimeError or TransferError), it has
closed the connection."""


class SocketTransport(KVTransport):
    """``timeout_s`` bounds a send that makes no progress. ``address`` is where it listens, as peers dial it."""

    def __init__(self, memory: Memory, secret: ServiceSecret, *, timeout_s: float = 10.0) -> None:
        self._memory, self._secret, self._timeout_s = memory, secret, timeout_s
        self.address = ""
        self._greet_s = 0.0
        """How long greeting a peer may take beyond the time limit of connecting."""
        self._unproven = 0
        self._accepted: asyncio.Queue[KVLink | None] = asyncio.Queue()
        self._links: set[KVLink] = set()
        self._acceptor: Acceptor | None = None
        self._closed = False

    @abstractmethod
    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        """Make a link of a connection whose two ends are proven. Raises OSError, EOFError, RuntimeError or
        TransferError if that fails."""

    def _serve(self, server: socket.socket, address: str) -> KVEndpoint:
        """Accept connections on a bound socket, which peers reach at ``address``, until the transport is closed."""
        self.address = address
        self._acceptor = Acceptor(server, self._strangers(), self._welcome)
        return KVEndpoint(self.name, address)

    @property
    def unproven(self) -> int:
        """How many peers were refused because they did not know the secret."""
        return self._unproven

    @property
    def _purpose(self) -> str:
        return f"kv {self.name}"

    def _strangers(self) -> Strangers:
        """The bounds on peers that have not introduced themselves."""
        return Strangers(self.name)

    async def accept(self) -> KVLink:
        """Return the next link that a peer opened."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost(f"this transport is closed ({self.name})")
        return link

    async def _open(self, connection: socket.socket, address: object, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Connect ``connection`` to ``address`` and make a link."""
        link: KVLink | None = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                connection.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(connection, address)  # type: ignore[arg-type]
                await prove_dialling(connection, self._secret, self._purpose, endpoint.address)
                if self._greet_s > timeout_s:
                    limit.reschedule(loop.time() + self._greet_s)
                link = await self._greet(connection, endpoint.address, connecting=True)
        except Unproven as error:
            raise TransferRefused(f"no link to {endpoint.address}: {error} ({self.name})") from None
        except TimeoutError:
            limit_s = max(timeout_s, self._greet_s)
            where = f"{endpoint.address} did not answer within {limit_s} s ({self.name})"
            raise TransferTimeout(where) from None
        except (OSError, EOFError, RuntimeError) as error:
            raise PeerLost(f"no link to {endpoint.address}: {error} ({self.name})") from None
        finally:
            if link is None:
                connection.close()
        return self._keep(link)

    async def aclose(self) -> None:
        """Stop listening and close every link."""
        self._closed = True
        self._accepted.put_nowait(None)
        if self._acceptor is not None:
            await self._acceptor.aclose()
        await asyncio.gather(*(link.aclose() for link in list(self._links)))

    async def _welcome(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        link: KVLink | None = None
        try:
            await prove_listening(connection, self._secret, self._purpose, self.address)
            link = await self._greet(connection, peer, connecting=False)
        except Unproven as error:
            self._unproven += 1
            raise TransferRefused(f"{peer}: {error}") from None
        finally:
            if link is None:
                connection.close()
        link.strange(stranger)
        self._accepted.put_nowait(self._keep(link))

    def _keep(self, link: KVLink) -> KVLink:
        self._links.add(link)
        link.on_closed = self._links.discard
        return link


class Acceptor:
    """Passes each connection on ``server``, a bound socket, to ``welcome`` until `aclose`. While `Strangers` has no
    room, connections wait in the kernel."""

    def __init__(self, server: socket.socket, strangers: Strangers, welcome: Welcome) -> None:
        server.listen(_BACKLOG)
        server.setblocking(False)
        self._server, self._strangers, self._welcome = server, strangers, welcome
        self._welcoming: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def aclose(self) -> None:
        """Stop accepting, and close connections that are not links yet."""
        tasks = [self._accepting, *self._welcoming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server.close()

    async def _accept(self) -> None:
        while True:
            await self._strangers.room()
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:  # the peer has left the queue, or no file descriptor is free
                _log.warning("a connection could not be accepted: %s (%s)", error, self._strangers.name)
                await asyncio.sleep(_RETRY_S)
                continue
            self._begin(connection, str(address), self._strangers.enter())

    async def _readable(self) -> None:
        """Return when a connection waits. `loop.sock_accept` would lose one that it has accepted when it is
        cancelled."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._server, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._server)

    def _begin(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        task = asyncio.create_task(self._meet(connection, peer, stranger))
        self._welcoming.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._welcoming.discard(task)
            if not stranger.met:  # cancelled before its first step
                connection.close()
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("a peer's connection failed (%s)", self._strangers.name, exc_info=error)
            if task.cancelled() or error is not None:
                stranger.leave()

        task.add_done_callback(ended)

    async def _meet(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        task = asyncio.current_task()
        assert task is not None
        stranger.met, stranger.cut = True, task.cancel
        try:
            connection.setblocking(False)
            await self._welcome(connection, peer, stranger)
        except (OSError, EOFError, RuntimeError, TransferError) as error:
            self._strangers.complain(str(error or "it timed out"))
            stranger.leave()
