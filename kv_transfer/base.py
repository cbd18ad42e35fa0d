"""The interface of transports: links that carry messages between two workers, and move announced regions of one's pool
into the other's.

    KVReceiver's side                                      KVSender's side
    listen() → endpoint                ←── handshake ───   connect(endpoint) → KVLink
    accept() → KVLink
    link.recv() → Message              ←─── messages ───   link.send(header, await link.payload(regions))
    await link.fetch(regions)          ←── the regions ─
    link.send(header)                  ──── answers ───→   link.recv() → Message

A transport knows the memory of its worker's pool, and nothing of requests or blocks. One-sided transports announce
where a payload lies, and the receiver fetches it out of the sender's memory; streaming ones have the bytes follow the
announcement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.fetch import Fetch, Payload, staged
from kv_transfer.memory import DeviceMemory, Memory
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import Region

MAX_PAYLOAD_BYTES = 64 * 2**20
"""Every transport carries payloads up to this; a larger one is a ValueError of `KVLink.send`."""

MAX_HEADER_BYTES = 64 * 2**10
"""The same for headers."""

NOTHING = Payload(None, ())
"""The payload of a message that is a header alone."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it arrived: a small header (msgpack, checked by whatever reads it), and how many bytes of payload
    wait behind it for `KVLink.fetch`."""

    header: bytes
    size: int


class KVLink(ABC):
    """An ordered two-way pipe of messages with one peer, between this worker's ``memory`` and the peer's. One task
    sends and one receives at a time. An end that sends payloads needs a task that receives: where no hardware serves
    the peer's reads, that task does."""

    transport: str
    """The name of the transport it belongs to."""
    arrival_s = 0.0
    """What the payload of the last message took to arrive before `fetch`, where it arrives whole (else 0)."""
    on_device = False
    """Whether payloads go from device memory to device memory, as tensors. They are not hashed: no processor sees
    them."""
    reads_late = False
    """Whether the receiver may read a payload after the sender has cut the link and given the blocks away, without
    noticing that it was cut. Then a payload counts only if its checksum is right, whatever is configured, or, where
    nothing is hashed, if the sender confirms that it still held the blocks (`protocol.Confirm`)."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def hashes(self, configured: bool) -> bool:
        """Whether payloads are hashed on this link, given what is ``configured`` (`transfer.checksum`). The same at
        both ends."""
        return (configured or self.reads_late) and not self.on_device

    async def payload(self, regions: Sequence[Region]) -> Payload:
        """A payload of regions of the memory, as this link sends it: memory on a device is staged on the host for a
        link that is not ``on_device``. ValueError if the memory is closed."""
        if isinstance(self.memory, DeviceMemory) and not self.on_device:
            return await staged(self.memory, regions)
        return Payload(self.memory, regions)

    @abstractmethod
    async def send(self, header: bytes, payload: Payload = NOTHING) -> None:
        """Send one message; the payload's parts stay as they are until `drained`. Returns once the transport has taken
        it, with back-pressure: with a peer that does not receive, it waits (a payload that is fetched weighs nothing
        here). PeerLost if the connection is gone, TransferTimeout if nothing was taken for as long as the transport's
        own bound. A cancelled or failed send may have gone out or not."""

    async def drained(self) -> None:  # noqa: B027 - most transports have let go of the parts when `send` returns
        """Return once nothing reads the parts of what was sent so far: they may then change. A link that is lost reads
        nothing. Needs a task that receives. Unbounded: put a timeout around it, and `cut` a link that lets it pass."""

    def introduced(self) -> None:  # noqa: B027 - links within a process know both ends
        """The peer has said who it is. A link that was accepted takes from then on what it likes; before, one message
        of `strangers.MAX_HELLO_BYTES` without a payload, and it is cut after `strangers.INTRODUCTION_S`, or when too
        many others wait."""

    @abstractmethod
    def cut(self, why: str) -> None:
        """End the link at once, whatever is on its way: nothing reads the parts of what was sent, or what was read
        counts for nothing. Tasks that send or receive see PeerLost, at the peer as well. `aclose` has to follow.
        Cutting twice is fine, and so is cutting what is closed."""

    @abstractmethod
    async def recv(self) -> Message:
        """The next message; waits for as long as the link lives. What was not fetched of the payload before it is
        thrown away. PeerLost once the peer is gone and everything it sent before has been received."""

    def fetch(
        self,
        into: Sequence[Region],
        *,
        hashed: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Fetch:
        """The handle on moving the payload of the last message into regions of the memory that have its size; await it
        before the next `recv`."""
        return Fetch(self.memory, into, self._move, on_device=self.on_device, hashed=hashed, on_progress=on_progress)

    @abstractmethod
    async def _move(self, fetch: Fetch) -> None:
        """What awaiting ``fetch`` does."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions, after what was sent is on its way (bounded); the peer sees PeerLost. Closing twice is
        fine, and so is closing while another task sends or receives: it sees PeerLost."""


class KVTransport(ABC):
    """One way of moving messages and regions. An instance serves one worker, whose memory it was made with: it may
    listen once and connect to many."""

    name: str

    @abstractmethod
    async def listen(self, host: str, port: int = 0) -> KVEndpoint:
        """Start to accept links on ``host`` (an address peers can reach) and ``port`` (0: a free one), if it uses ports
        at all. PeerLost if that address is not this host's or the port is taken."""

    @abstractmethod
    async def accept(self) -> KVLink:
        """The next link a peer opened; PeerLost once this transport is closed."""

    @abstractmethod
    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a link. TransferTimeout or PeerLost if nobody answers there in time."""

    def obstacle(self, endpoint: KVEndpoint) -> str | None:
        """Why `connect` cannot reach this endpoint, in words, if that is certain without trying."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Stop listening and close every link. Closing twice is fine."""
