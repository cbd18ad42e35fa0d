"""What transports on stream sockets share: they accept connections, exchange proofs with the peer, and keep their
links.

The proofs of `runtime.secret` come before anything else:

    dialling end                                  listening end
    magic, greeting (48 bytes)            ──▶
                                          ◀──     nonce, proof (64 bytes)
    proof (32 bytes)                      ──▶

All sizes are fixed, so a peer without the secret makes this process hold a few hundred bytes, and nothing of it is
parsed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod

from kv_transfer.base import KVLink, KVTransport, Tasks
from kv_transfer.memory import Memory
from kv_transfer.pending_peers import INTRODUCTION_S, MAX_PENDING_PEERS, HandshakeLimit, PendingPeer
from pdserve.core.errors import PeerLost, TransferError, TransferRefused, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from runtime.secret import NONCE_BYTES, PROOF_BYTES, AuthenticationFailed, ServiceSecret, Side, new_nonce

MAGIC = b"pdserve-kv/3\n\0\0\0"
_BACKLOG = 128
_RETRY_S = 0.1
_log = logging.getLogger(__name__)


class SocketTransport(KVTransport):
    """``timeout_s`` bounds a send that makes no progress. ``address`` is where it listens, as peers dial it. While
    there are as many pending peers as allowed, connections wait in the kernel."""

    max_pending_peers = MAX_PENDING_PEERS

    def __init__(self, memory: Memory, secret: ServiceSecret, *, timeout_s: float = 10.0) -> None:
        super().__init__(memory, timeout_s)
        self._secret = secret
        self.address = ""
        self._greet_s = 0.0
        """How long greeting a peer may take beyond the time limit of connecting."""
        self._server: socket.socket | None = None
        self._handshake_limit: HandshakeLimit | None = None
        self._tasks = Tasks()

    @abstractmethod
    async def _greet(self, connection: socket.socket, peer: str, *, connecting: bool) -> KVLink:
        """Make a link of a connection whose two ends are proven. Raises OSError, EOFError, RuntimeError or
        TransferError if that fails."""

    def _serve(self, server: socket.socket, address: str) -> KVEndpoint:
        """Accept connections on a bound socket, which peers reach at ``address``, until the transport is closed."""
        server.listen(_BACKLOG)
        server.setblocking(False)
        self._server, self.address = server, address
        self._handshake_limit = HandshakeLimit(self.name, self.max_pending_peers, INTRODUCTION_S + self._greet_s)
        self._tasks.spawn(self._accept_on(server, self._handshake_limit))
        return KVEndpoint(self.name, address)

    @property
    def _purpose(self) -> str:
        return f"kv {self.name}"

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
        except AuthenticationFailed as error:
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
        """Stop accepting, and close every link and connection."""
        await self._tasks.aclose()
        if self._server is not None:
            self._server.close()
        await super().aclose()

    async def _accept_on(self, server: socket.socket, limit: HandshakeLimit) -> None:
        while True:
            await limit.room()
            try:
                connection, address = server.accept()
            except BlockingIOError:
                await ready(server)  # `loop.sock_accept` would lose a connection when it is cancelled
                continue
            except OSError as error:  # the peer has left the queue, or no file descriptor is free
                _log.warning("a connection could not be accepted: %s (%s)", error, self.name)
                await asyncio.sleep(_RETRY_S)
                continue
            self._welcome(connection, str(address), limit)

    def _welcome(self, connection: socket.socket, peer: str, limit: HandshakeLimit) -> None:
        """Make a link of an accepted connection, in a task of its own."""
        pending = limit.add()
        task = self._tasks.spawn(self._meet(connection, peer, pending))
        pending.cut = lambda _: task.cancel()

        def ended(task: asyncio.Task[None]) -> None:
            error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                return
            connection.close()
            if isinstance(error, OSError | EOFError | RuntimeError | TransferError):
                limit.log_rejection(str(error) or "it timed out")
            elif not task.cancelled():
                _log.error("a peer's connection failed (%s)", self.name, exc_info=error)
            pending.leave()

        task.add_done_callback(ended)

    async def _meet(self, connection: socket.socket, peer: str, pending: PendingPeer) -> None:
        connection.setblocking(False)
        try:
            await prove_listening(connection, self._secret, self._purpose, self.address)
            link = await self._greet(connection, peer, connecting=False)
        except AuthenticationFailed as error:
            self._num_unauthenticated += 1
            raise TransferRefused(f"{peer}: {error}") from None
        link.set_pending(pending)
        self._accepted.put_nowait(self._keep(link))


async def ready(connection: socket.socket, *, writing: bool = False) -> None:
    """Wait until a socket can be read, or written."""
    loop, event, fd = asyncio.get_running_loop(), asyncio.Event(), connection.fileno()
    (loop.add_writer if writing else loop.add_reader)(fd, event.set)
    try:
        await event.wait()
    finally:
        (loop.remove_writer if writing else loop.remove_reader)(fd)


async def prove_dialling(connection: socket.socket, secret: ServiceSecret, purpose: str, address: str) -> None:
    """Prove this end, which has dialled ``address``, once the listening end is proven. AuthenticationFailed if that
    does not know the secret, EOFError if it closes the connection, OSError if the connection breaks. Needs a timeout
    around it, as `prove_listening` does."""
    loop, greeting = asyncio.get_running_loop(), new_nonce()
    await loop.sock_sendall(connection, MAGIC + greeting)
    challenge = await read_exactly(connection, NONCE_BYTES + PROOF_BYTES)
    nonces = greeting, challenge[:NONCE_BYTES]
    secret.verify(challenge[NONCE_BYTES:], purpose, Side.LISTENING, nonces, address)
    await loop.sock_sendall(connection, secret.proof(purpose, Side.DIALLING, nonces, address))


async def prove_listening(connection: socket.socket, secret: ServiceSecret, purpose: str, address: str) -> None:
    """Prove this end, which listens at ``address``, and return once the dialling end is proven. Raises as
    `prove_dialling` does; EOFError also if the peer speaks another protocol."""
    loop = asyncio.get_running_loop()
    if await read_exactly(connection, len(MAGIC)) != MAGIC:
        raise EOFError("the peer speaks another protocol")
    nonces = await read_exactly(connection, NONCE_BYTES), new_nonce()
    challenge = nonces[1] + secret.proof(purpose, Side.LISTENING, nonces, address)
    await loop.sock_sendall(connection, challenge)
    secret.verify(await read_exactly(connection, PROOF_BYTES), purpose, Side.DIALLING, nonces, address)


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes. EOFError if the peer closes the connection before. Needs a timeout around it."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return data
