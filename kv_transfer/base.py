"""The interface of transports. Their links carry messages between two workers, and move regions of one worker's pool
into the other's.

    KVReceiver's side                                      KVSender's side
    listen() → endpoint                ←─── proofs ─────   connect(endpoint) → KVLink
    accept() → KVLink
    link.recv() → Message              ←─── messages ───   link.send(header, await link.payload(regions))
    await link.fetch(regions)          ←── the regions ─
    link.send(header)                  ──── answers ───→   link.recv() → Message

A transport knows the memory of its worker's pool and the service's secret, and nothing about requests or blocks. A
one-sided transport announces where a payload lies, and the receiver fetches it from the sender's memory. With a
streaming transport, the bytes follow the announcement.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kv_transfer.fetch import Coded, Fetch, Payload, staged
from kv_transfer.memory import DeviceMemory, Memory
from kv_transfer.pending_peers import PendingPeer
from pdserve.core.errors import PeerLost
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region

MAX_PAYLOAD_BYTES = 64 * 2**20
"""The largest payload of a message, for all transports."""

MAX_HEADER_BYTES = 64 * 2**10
"""The largest header of a message, for all transports."""

DEVICE_MESSAGE_BYTES = 32 * 2**20
"""Least size of messages between devices: smaller ones do not fill a fast link between two operations."""

NOTHING = Payload(None, ())
"""The payload of a message that has only a header."""

ENCRYPTED = ", encrypted (TLS)"
"""The note of links that use TLS."""


def check_sizes(header: bytes, payload: Payload) -> int:
    """The payload's bytes. ValueError if the payload or the header is too large for a message."""
    size = payload.size
    if size > MAX_PAYLOAD_BYTES or len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a message of {len(header)} + {size} bytes; the limit is {MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}"
        )
    return size


class Tasks(set[asyncio.Task[None]]):
    """The running tasks of an object, which ends them when it is closed."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task."""
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def aclose(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Message:
    """A received message: its header, which is not checked yet, and the number of payload bytes that
    `KVLink.fetch` moves."""

    header: bytes
    size: int


class KVLink(ABC):
    """An ordered two-way connection with one peer. Payloads move between this worker's ``memory`` and the peer's.

    One task sends and one task receives at a time. An end that sends payloads also needs a task that receives: it
    serves the peer's reads where no hardware does.
    """

    transport: str
    """The name of the transport."""
    on_device = False
    """Whether payloads move from device memory to device memory. Such payloads are hashed only with
    `transfer.checksum: device`."""
    codes = False
    """Whether payloads may be coded (`transfer.codec`): the link can send bytes that lie in no pool."""
    reads_late = False
    """Whether the receiver may still read a payload after the sender has cut the link and reused the blocks. If so, a
    payload counts only with a correct checksum or, where nothing is hashed, with a `protocol.Confirm` of the sender."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.on_closed: Callable[[KVLink], object] = lambda _: None
        """Called by `aclose`."""
        self._pending_peer: PendingPeer | None = None

    def hashes(self, configured: bool | Literal["device"]) -> bool:
        """Whether payloads are hashed on this link, where `transfer.checksum` is ``configured``. Both ends agree."""
        return configured == "device" if self.on_device else bool(configured) or self.reads_late

    async def payload(self, regions: Sequence[Region], *, by_value: bool = False) -> Payload:
        """A payload of regions of the memory, copied to the host if it lies on a device and the link is not
        ``on_device``. ``by_value``: the message has the bytes in it, as it has coded ones, even where the link lets
        the peer read the memory. ValueError if the memory is closed."""
        if isinstance(self.memory, DeviceMemory) and not self.on_device:
            return await staged(self.memory, regions)
        payload = Payload(self.memory, regions)
        return Payload(None, (), payload.parts) if by_value else payload

    @property
    def least_message_bytes(self) -> int:
        """The least size of messages that fills this link. The sender makes them as large where it has so many
        blocks."""
        return DEVICE_MESSAGE_BYTES if self.on_device else 0

    @abstractmethod
    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Send one message. The payload's bytes must not change until `drained` returns.

        Waits while a slow peer leaves no room in the transport's buffers; payloads that the peer fetches take no room.
        PeerLost if the connection is gone, TransferTimeout if the peer takes nothing for as long as the transport's
        bound, ValueError if the message is too large. After an error or a cancellation, the message may have been sent.
        """

    async def drained(self) -> None:  # noqa: B027 - most transports have copied the parts when `send` returns
        """Return when nothing reads the payloads sent so far, or when the link is lost. Needs a task that receives.
        Unbounded: put a timeout around it, and `cut` the link when it expires."""

    def set_pending(self, pending: PendingPeer) -> None:
        """Limit what the peer of an accepted link may do until `introduced`: it may send one message of at most
        `pending_peers.MAX_HELLO_BYTES` without a payload, and the link is cut when its time is over."""
        self._pending_peer, pending.cut = pending, self.cut

    def introduced(self) -> None:
        """Lift the limits of `set_pending`: the peer has introduced itself. May be called twice."""
        if self._pending_peer is not None:
            self._pending_peer.leave()
            self._pending_peer = None

    @abstractmethod
    def cut(self, why: str) -> None:
        """End the link at once. Afterwards nothing reads the payloads that were sent, or what is read does not count.
        Tasks that send or receive get PeerLost, at both ends. `aclose` must follow. May be called twice, or after
        `aclose`."""

    @abstractmethod
    async def recv(self) -> Message:
        """Wait for the next message. Drops what was not fetched of the payload before. PeerLost when the peer is gone
        and all its messages have been received."""

    def fetch(
        self,
        into: Sequence[Region],
        *,
        hashed: bool = False,
        coded: Coded | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Fetch:
        """A `Fetch` that moves the last message's payload into regions of the memory, which must have its size unless
        it is ``coded``. Await it before the next `recv`."""
        on_device, memory = self.on_device, self.memory
        return Fetch(memory, into, self._move, on_device=on_device, hashed=hashed, coded=coded, on_progress=on_progress)

    @abstractmethod
    async def _move(self, fetch: Fetch) -> None:
        """Move the payload of ``fetch``."""

    @abstractmethod
    async def aclose(self) -> None:
        """Send what is queued (within a time limit) and close the link; the peer gets PeerLost, and so do tasks here
        that send or receive. May be called twice."""


class KVTransport(ABC):
    """One way of moving messages and regions, for one worker and its memory. It listens at most once, and connects to
    any number of peers."""

    name: str
    note = ""
    """What users have to know about its links. It follows the reason for which a pair uses the transport."""

    def __init__(self, memory: Memory, timeout_s: float = 10.0) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self.wrap: Callable[[KVLink], KVLink] = lambda link: link
        """Applied to each new link."""
        self._accepted: asyncio.Queue[KVLink | None] = asyncio.Queue()
        self._links: set[KVLink] = set()
        self._closed = False
        self._num_unauthenticated = 0

    @property
    def num_unauthenticated(self) -> int:
        """How many peers were refused because they did not prove that they know the service's secret."""
        return self._num_unauthenticated

    @abstractmethod
    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Accept links on ``host``, an address that peers can reach, and ``port`` (0: any free port; ignored by
        transports without ports). PeerLost if the address is not one of this host, or the port is taken."""

    async def accept(self) -> KVLink:
        """Wait for the next link that a peer opens, which has proven that it knows the service's secret. PeerLost when
        this transport is closed."""
        link = None if self._closed else await self._accepted.get()
        if link is None:
            self._accepted.put_nowait(None)
            raise PeerLost(f"this transport is closed ({self.name})")
        return link

    @abstractmethod
    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a link, and prove to each other that both ends know the service's secret. TransferTimeout or PeerLost if
        the peer does not answer in time, TransferRefused if it does not know the secret."""

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """The reason why `connect` cannot reach the endpoint, if that is known without trying."""
        return None

    async def aclose(self) -> None:
        """Stop listening and close every link. May be called twice."""
        self._closed = True
        self._accepted.put_nowait(None)
        await asyncio.gather(*(link.aclose() for link in list(self._links)))

    def _keep(self, link: KVLink) -> KVLink:
        """Wrap a new link, and close it with this transport."""
        link = self.wrap(link)
        self._links.add(link)
        link.on_closed = self._links.discard
        return link
