"""Transport over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Headers travel over a TCP connection, which also announces each payload's size; payloads travel as ``send``/``recv`` of
a process group that only the two ends of this link are in (over its own store, no global group). So a receive is
posted only for a payload that is on its way, and a lost peer is seen as the end of the TCP connection. A group that
failed is dropped with its link; the next connect builds another.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
from typing import TYPE_CHECKING, Any

from kv_transfer.base import MAX_HEADER_BYTES, KVLink, KVTransport
from kv_transfer.memory import Memory
from kv_transfer.transports.acceptor import Acceptor
from kv_transfer.transports.strangers import INTRODUCTION_S, MAX_HELLO_BYTES, Stranger, Strangers
from kv_transfer.transports.tcp import bind, tune
from kv_transfer.transports.threads import in_thread
from kv_transfer.transports.torch_groups import Backend, Groups
from kv_transfer.transports.torch_link import FRAME, TorchDistLink
from pdserve.core.errors import ConfigError, PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint

if TYPE_CHECKING:
    from kv_transfer.transports.torch_store import ExchangeStore

_GREETING: dict[Backend, bytes] = {"gloo": b"PDG1", "nccl": b"PDN1"}
_GREETING_BYTES = 4
_MAX_STRANGERS = 16  # fewer than elsewhere: each has a thread that builds its groups
_MAX_KEYS = 64  # of the store; a group has a few
_STORE_MODULE = "kv_transfer.transports.torch_store"


class TorchDistTransport(KVTransport):
    """Listens on a TCP port. ``timeout_s`` bounds one send or receive of a payload. Payloads are ``on_device`` with
    NCCL, unless stated otherwise (by tests, in which Gloo carries tensors)."""

    name = "torch_dist"

    def __init__(
        self, memory: Memory, *, backend: Backend = "gloo", timeout_s: float = 10.0, on_device: bool | None = None
    ) -> None:
        self._memory = memory
        self._backend: Backend = backend
        self._on_device = backend == "nccl" if on_device is None else on_device
        self._timeout_s = timeout_s
        self._acceptor: Acceptor | None = None
        self._accepted: asyncio.Queue[TorchDistLink | None] = asyncio.Queue()
        self._links: set[TorchDistLink] = set()
        self._closed = False

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept connections. The groups of each link meet on ports that the system picks."""
        await self._import()
        server = await bind(host, port, self.name)
        # NCCL's groups may take as long to make as a send may take.
        introduction_s = INTRODUCTION_S if self._backend == "gloo" else max(INTRODUCTION_S, self._timeout_s)
        self._acceptor = Acceptor(server, Strangers(self.name, _MAX_STRANGERS, introduction_s), self._welcome)
        return KVEndpoint(self.name, f"{host}:{server.getsockname()[1]}")

    async def accept(self) -> KVLink:
        """The next link whose groups are in place."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost("this transport is closed (torch_dist)")
        return link

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open the connection, check that both ends use the same backend, join the groups."""
        host, _, port = endpoint.address.rpartition(":")
        writer: asyncio.StreamWriter | None = None
        link: TorchDistLink | None = None
        await self._import()
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(_GREETING[self._backend])
                if await reader.readexactly(_GREETING_BYTES) != _GREETING[self._backend]:
                    raise ConfigError(
                        f"transfer.transport: torch_dist uses {self._backend} here but not at {endpoint.address}"
                    )
                link = await self._join(reader, writer, 1)
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
        if self._acceptor is not None:
            await self._acceptor.aclose()
        await asyncio.gather(*(link.aclose() for link in list(self._links)))

    async def _import(self) -> Any:
        """The module of the store: it imports torch, which takes seconds and is no part of any peer's timeout."""
        if _STORE_MODULE not in sys.modules:
            await in_thread("kv-torch-import", lambda: importlib.import_module(_STORE_MODULE))
        return importlib.import_module(_STORE_MODULE)

    async def _welcome(self, connection: socket.socket, peer: str, stranger: Stranger) -> None:
        """See `acceptor.Welcome`."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_HELLO_BYTES)
        link: TorchDistLink | None = None
        try:
            greeting = await reader.readexactly(_GREETING_BYTES)
            writer.write(_GREETING[self._backend])
            if greeting != _GREETING[self._backend]:
                raise EOFError("the peer speaks something else")
            link = await self._join(reader, writer, 0)
        finally:
            if link is None:
                writer.close()
        link.strange(stranger)
        self._accepted.put_nowait(link)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int) -> TorchDistLink:
        """Build the groups in a thread while their store's keys travel over the connection; an empty key ends them."""
        loop = asyncio.get_running_loop()
        connection: socket.socket = writer.get_extra_info("socket")
        tune(connection)
        hosts = connection.getsockname()[0], connection.getpeername()[0]

        def publish(key: bytes, value: bytes) -> None:
            loop.call_soon_threadsafe(writer.write, FRAME.pack(len(key), len(value)) + key + value)

        def build() -> Groups:
            groups = Groups(self._backend, store, rank, hosts, self._timeout_s, on_device=self._on_device)
            publish(b"", b"")
            return groups

        store: ExchangeStore = (await self._import()).ExchangeStore(publish, self._timeout_s)
        try:
            groups, _ = await asyncio.gather(in_thread("kv-torch-join", build), _take_keys(reader, store))
        finally:
            store.close()
        link = TorchDistLink(self._memory, reader, writer, groups, self._timeout_s, on_device=self._on_device)
        self._links.add(link)
        link.on_closed = self._links.discard
        return link


async def _take_keys(reader: asyncio.StreamReader, store: ExchangeStore) -> None:
    left = MAX_HEADER_BYTES
    for _ in range(_MAX_KEYS):
        key_size, size = FRAME.unpack(await reader.readexactly(FRAME.size))
        if not key_size:
            return
        left -= key_size + size
        if left < 0:
            raise OSError(f"the peer sent a key of {key_size} + {size} bytes, and {MAX_HEADER_BYTES} in all are taken")
        key = await reader.readexactly(key_size)
        store.receive(key.decode(errors="replace"), await reader.readexactly(size))
    raise OSError(f"the peer sent more than {_MAX_KEYS} keys")
