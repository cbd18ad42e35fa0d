"""A transport within one process and event loop, without sockets."""

from __future__ import annotations

import asyncio
import itertools

from kv_transfer import factory
from kv_transfer.base import NOTHING, KVLink, KVTransport, check_sizes
from kv_transfer.fetch import Payload
from kv_transfer.memory import Memory
from kv_transfer.transports.inbox import InboxLink
from kv_transfer.transports.shaped import Shape
from pdserve.core.errors import PeerLost, TransferTimeout
from pdserve.core.handoff import KVEndpoint
from runtime.plane_tls import PlaneTls
from runtime.secret import ServiceSecret
from tests.certificates import service_tls

SECRET = ServiceSecret(bytes(range(32)))
"""Of the services that tests make."""
TLS, SHAPED = "tls ", "shaped "
SHAPE = Shape(gbps=16.0, round_trip_ms=4.0)
"""Of transports whose names begin with `SHAPED`."""
_listening: dict[str, LoopbackTransport] = {}
_numbers = itertools.count(1)


class LoopbackLink(InboxLink):
    """One end: it takes from its own inbox and puts into the peer's."""

    peer: LoopbackLink

    def __init__(self, memory: Memory, timeout_s: float) -> None:
        super().__init__("loopback", memory)
        self._timeout_s = timeout_s

    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Copy the message into the peer's inbox."""
        check_sizes(header, payload)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.peer._put((header, b"".join(payload.parts)))
        except TimeoutError:
            raise TransferTimeout(f"the peer took nothing for {self._timeout_s} s (loopback)") from None

    def cut(self, why: str) -> None:
        """End both inboxes."""
        self.peer._end(PeerLost(f"{why} (loopback)"))
        self._end(PeerLost(f"{why} (loopback)"))

    async def aclose(self) -> None:
        """End both inboxes; what the peer has not taken yet stays there for it."""
        self.peer._end(PeerLost("the peer closed the link (loopback)"))
        self._end(PeerLost("the link was closed here (loopback)"), discard=True)
        self.on_closed(self)


class LoopbackTransport(KVTransport):
    """Finds its peers in a table of this process. ``timeout_s`` bounds one send."""

    name = "loopback"
    _address = ""

    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Enter the table under a name of its own; ``host`` is part of it."""
        self._address = f"{host}/{next(_numbers)}"
        _listening[self._address] = self
        return KVEndpoint(self.name, self._address)

    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a link; PeerLost at once if nobody listens under this name in this process."""
        peer = _listening.get(endpoint.address)
        if peer is None:
            raise PeerLost(f"nobody listens at {endpoint.address} in this process (loopback)")
        link, accepted = LoopbackLink(self._memory, self._timeout_s), LoopbackLink(peer._memory, peer._timeout_s)
        link.peer, accepted.peer = accepted, link
        peer._accepted.put_nowait(peer._keep(accepted))
        return self._keep(link)

    async def aclose(self) -> None:
        """Leave the table and close every link."""
        _listening.pop(self._address, None)
        await super().aclose()


def create_transport(
    name: str,
    memory: Memory,
    secret: ServiceSecret = SECRET,
    *,
    tls: PlaneTls | None = None,
    timeout_s: float = 10.0,
    shape: Shape | None = None,
) -> KVTransport:
    """As `kv_transfer.factory.create_transport`, which does not know ``loopback``, ``shaped NAME`` and ``tls NAME``."""
    if name == "loopback":
        return LoopbackTransport(memory, timeout_s=timeout_s)
    if name.startswith(TLS):
        return factory.create_transport(name.removeprefix(TLS), memory, secret, tls=service_tls(), timeout_s=timeout_s)
    if name.startswith(SHAPED):
        return factory.create_transport(
            name.removeprefix(SHAPED), memory, secret, tls=tls, timeout_s=timeout_s, shape=SHAPE
        )
    return factory.create_transport(name, memory, secret, tls=tls, timeout_s=timeout_s, shape=shape)
