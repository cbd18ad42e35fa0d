"""Transport over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Headers travel over a TCP connection, which also announces each payload's size; payloads travel as ``send``/``recv`` of
a process group that only the two ends of this link are in (over its own TCPStore, no global group). So a receive is
posted only for a payload that is on its way, and a lost peer is seen as the end of the TCP connection. A group that
failed is dropped with its link; the next connect builds another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core.errors import ConfigError, PeerLost, TransferError, TransferTimeout
from core.handoff import KVEndpoint
from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, KVLink, KVTransport, Message
from kv_transfer.transports.inbox import Inbox, check_sizes
from kv_transfer.transports.threads import in_thread
from kv_transfer.transports.torch_groups import Backend, Groups, open_store

_FRAME = struct.Struct("<IQ")  # length of the header, length of the payload
_QUEUED_FRAMES = 256
_GREETING: dict[Backend, bytes] = {"gloo": b"PDG1", "nccl": b"PDN1"}
_STORE_PORT = struct.Struct("<H")  # 0: this end uses the other backend
_log = logging.getLogger(__name__)


class TorchDistLink(KVLink):
    """A TCP connection for headers, process groups for payloads, one thread for each direction of them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, groups: Groups, timeout_s: float):
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self._groups: Groups | None = groups
        self._peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        self._inbox = Inbox()
        self._announced: asyncio.Queue[tuple[bytes, int] | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._receiving = False
        self._closed = False
        self._why = ""
        self._senders = ThreadPoolExecutor(1, "kv-torch-send")
        self._receivers = ThreadPoolExecutor(1, "kv-torch-recv")
        self._tasks = [asyncio.create_task(self._read_frames()), asyncio.create_task(self._fetch())]

    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Announce the payload, then send it in the sending thread."""
        size = check_sizes(header, payload)
        if self._inbox.ended is not None or self._groups is None:
            raise self._inbox.ended or PeerLost(f"{self._peer}: the link is down (torch_dist)")
        groups = self._groups
        try:
            self._writer.write(_FRAME.pack(len(header), size) + header)
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} took nothing for {self._timeout_s} s (torch_dist)") from None
        except OSError as error:
            raise self._fail(error) from None
        if not size:
            return
        loop = asyncio.get_running_loop()
        sent = loop.run_in_executor(self._senders, groups.send, payload)
        try:
            await asyncio.shield(sent)
        except asyncio.CancelledError:
            # The thread still reads the parts; closing makes the peer drop its group, which ends the thread's wait.
            self._fail("a send was cancelled")
            await asyncio.wait({sent})
            sent.exception()
            raise
        except RuntimeError as error:
            raise self._fail(error) from None

    async def recv(self) -> Message:
        """The next message."""
        return await self._inbox.get()

    @property
    def closed(self) -> bool:
        """Whether `aclose` has been called here."""
        return self._closed

    async def aclose(self) -> None:
        """Close the connection, drop the groups and let the threads end."""
        self._closed = True
        self._inbox.end(PeerLost(f"the link to {self._peer} was closed here (torch_dist)"), discard=True)
        self._writer.close()
        if self._groups is not None:
            self._groups.abort()
        self._groups = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._senders.shutdown(wait=False)
        self._receivers.shutdown(wait=False)

    async def _read_frames(self) -> None:
        try:
            while True:
                header_size, size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
                    self._why = f"the peer announced a message of {header_size} + {size} bytes"
                    break
                await self._announced.put((await self._reader.readexactly(header_size), size))
        except (OSError, asyncio.IncompleteReadError):
            self._why = "the peer closed the link"
        if not self._receiving:  # a receive under way is the peer's last message, or fails by itself
            self._groups = None
        await self._announced.put(None)

    async def _fetch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (frame := await self._announced.get()) is not None:
                header, size = frame
                payload: Buffer = b""
                if size:
                    if self._groups is None:  # the peer is gone: this payload never left it
                        break
                    self._receiving = True
                    payload = await loop.run_in_executor(self._receivers, self._groups.recv, size)
                    self._receiving = False
                await self._inbox.put(Message(header, payload))
        except RuntimeError as error:
            self._fail(error)
        except TransferError:
            return  # closed here
        self._fail(self._why)

    def _fail(self, why: BaseException | str) -> TransferError:
        """End the link and drop its groups, both ends' (the peer sees the connection end)."""
        timed_out = "timed out" in str(why).lower()
        error = (TransferTimeout if timed_out else PeerLost)(f"{self._peer}: {why} (torch_dist)")
        self._inbox.end(error)
        if self._groups is not None:
            self._groups.abort()
        self._groups = None
        self._writer.close()
        return error


class TorchDistTransport(KVTransport):
    """Listens on a TCP port. ``timeout_s`` bounds one send or receive of a payload."""

    name = "torch_dist"

    def __init__(self, *, backend: Backend = "gloo", timeout_s: float = 10.0) -> None:
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._accepted: asyncio.Queue[TorchDistLink | None] = asyncio.Queue()
        self._links: list[TorchDistLink] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def listen(self, host: str) -> KVEndpoint:
        """Accept connections on a free port of ``host``; PeerLost if that address is not this host's."""
        try:
            self._server = await asyncio.start_server(self._greet, host, 0)
        except OSError as error:
            raise PeerLost(f"cannot listen on {host}: {error} (torch_dist)") from None
        port = self._server.sockets[0].getsockname()[1]
        return KVEndpoint(self.name, f"{host}:{port}")

    async def accept(self) -> KVLink:
        """The next link whose groups are in place."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost("this transport is closed (torch_dist)")
        return link

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open the connection, learn where the store is, join the groups."""
        host, _, port = endpoint.address.rpartition(":")
        writer: asyncio.StreamWriter | None = None
        link: TorchDistLink | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(_GREETING[self._backend])
                (store_port,) = _STORE_PORT.unpack(await reader.readexactly(_STORE_PORT.size))
                if not store_port:
                    raise ConfigError(
                        f"transfer.transport: torch_dist uses {self._backend} here but not at {endpoint.address}"
                    )
                store = await in_thread("kv-torch-store", lambda: open_store(host, store_port, timeout_s))
                link = await self._join(reader, writer, store, 1)
                return link
        except TimeoutError:
            raise TransferTimeout(f"{endpoint.address} did not answer within {timeout_s} s (torch_dist)") from None
        except (OSError, asyncio.IncompleteReadError, RuntimeError) as error:
            raise PeerLost(f"no link to {endpoint.address}: {error} (torch_dist)") from None
        finally:
            if link is None and writer is not None:
                writer.close()

    async def aclose(self) -> None:
        """Stop listening, close every link."""
        self._closed = True
        self._accepted.put_nowait(None)
        if self._server is not None:
            self._server.close()
        for task in self._greeting:
            task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)
        await asyncio.gather(*(link.aclose() for link in self._links))
        self._links.clear()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming connection until its link is made, or close it."""
        task = asyncio.current_task()
        assert task is not None
        self._greeting.add(task)
        link: TorchDistLink | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                if await reader.readexactly(4) != _GREETING[self._backend]:
                    writer.write(_STORE_PORT.pack(0))
                    return
                store = await in_thread("kv-torch-store", lambda: open_store(None, 0, self._timeout_s))
                writer.write(_STORE_PORT.pack(store.port))
                link = await self._join(reader, writer, store, 0)
                self._accepted.put_nowait(link)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, RuntimeError) as error:
            _log.warning("a peer's connection was given up: %s (torch_dist)", error)
        finally:
            self._greeting.discard(task)
            if link is None:
                writer.close()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, store: Any, rank: int
    ) -> TorchDistLink:
        _notice_dead_host(writer)
        local_host = writer.get_extra_info("sockname")[0]
        groups = await in_thread(
            "kv-torch-join", lambda: Groups(self._backend, store, rank, local_host, self._timeout_s)
        )
        link = TorchDistLink(reader, writer, groups, self._timeout_s)
        self._links = [other for other in self._links if not other.closed]
        self._links.append(link)
        return link


def _notice_dead_host(writer: asyncio.StreamWriter) -> None:
    """A host that vanished closes no connection: let TCP ask for it."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
