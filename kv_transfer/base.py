"""The two interfaces of this room.

`KVTransport` moves framed messages between two peers and knows nothing of requests or blocks. `BlockStore` is the
pool as sender and receiver see it (a worker's mapping of its engine's pool satisfies it).

    KVReceiver's side                                KVSender's side
    listen() → endpoint          ←── handshake ───   connect(endpoint) → KVLink
    accept() → KVLink
    link.recv() → Message        ←─── messages ───   link.send(header, payload)
    link.take(sink)              ←─── payload ────
    link.send(header)            ──── answers ───→   link.recv() → Message
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.sink import Sink, Stretch
from pdserve.core.handoff import KVEndpoint
from pdserve.core.kv_layout import KVLayout

MAX_PAYLOAD_BYTES = 64 * 2**20
"""Every transport carries payloads up to this; a bigger one is a ValueError of `KVLink.send`."""

MAX_HEADER_BYTES = 64 * 2**10
"""The same for headers."""

Buffer = bytes | bytearray | memoryview
"""Raw host bytes, contiguous, ``len`` of them. Links that are `KVLink.on_device` take tensors of uint8 instead."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it arrived: a small header (msgpack, checked by whoever reads it), and how many bytes of payload
    wait behind it for `KVLink.take`."""

    header: bytes
    size: int


class KVLink(ABC):
    """An ordered two-way pipe of messages with one peer. One task sends and one receives at a time."""

    transport: str
    """The name of the transport it belongs to."""
    arrival_s = 0.0
    """What the payload of the last message took to arrive before `take`, where it arrives whole (else 0)."""
    on_device = False
    """Whether payloads go from device memory to device memory, as tensors. They are not hashed: nothing of them comes
    near a processor that could."""
    reads_late = False
    """Whether the receiver may read a payload after the sender has cut the link and given the blocks away, without
    noticing that it was cut. Then the checksum alone tells, and is not optional."""

    def hashes(self, configured: bool) -> bool:
        """Whether payloads are hashed on this link, given what is ``configured`` (`transfer.checksum`). The same at
        both ends."""
        return (configured or self.reads_late) and not self.on_device

    @abstractmethod
    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send one message; the payload's parts are joined on the way, and stay as they are until `drained`. Returns
        once the transport has taken it, with back-pressure: with a peer that does not receive, it waits (a payload in
        memory that both ends map weighs nothing here). PeerLost if the connection is gone, TransferTimeout if nothing
        was taken for as long as the transport's own bound. A cancelled or failed send may have gone out or not."""

    async def drained(self) -> None:  # noqa: B027 - most transports have let go of the parts when `send` returns
        """Return once nothing reads the parts of what was sent so far: they may then change. A link that is lost reads
        nothing. Needs a task that receives. Unbounded: put a timeout around it, and `cut` a link that lets it pass."""

    def introduced(self) -> None:  # noqa: B027 - links within a process know both ends
        """The peer has said who it is. A link that was accepted takes from then on what it likes; before, one message
        of `strangers.MAX_HELLO_BYTES` without a payload, and it is cut after `strangers.INTRODUCTION_S`, or when too
        many others wait."""

    @abstractmethod
    def cut(self, why: str) -> None:
        """End the link at once, without a care for what is on its way: nothing reads the parts of what was sent, or
        what was read counts for nothing. Whoever sends or receives sees PeerLost, at the peer as well. `aclose` has to
        follow. Cutting twice is fine, and so is cutting what is closed."""

    @abstractmethod
    async def recv(self) -> Message:
        """The next message; waits for as long as the link lives. What was not taken of the payload before it is thrown
        away. PeerLost once the peer is gone and everything it sent before has been received."""

    @abstractmethod
    async def take(self, sink: Sink) -> None:
        """Move the payload of the last message into ``sink``, which has exactly its size. Returns early once the sink
        is closed (by another task: nothing is written from then on). PeerLost if the rest does not come."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions, after what was sent is on its way (bounded); the peer sees PeerLost. Closing twice is
        fine, and so is closing while another task sends or receives: it sees PeerLost."""


class KVTransport(ABC):
    """One way of moving messages. An instance serves one worker: it may listen once and connect to many."""

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


class Landing(Protocol):
    """Room for blocks that are about to arrive."""

    @property
    def parts(self) -> Sequence[Stretch]:
        """Memory to be filled in order: the pool itself, or (for a pool on a device) memory staged for it."""
        ...

    def commit(self) -> None:
        """The parts are filled: returns when the blocks are in the pool."""
        ...


class BlockStore(Protocol):
    """A KV pool as bytes: block i is ``layout.block_bytes`` contiguous bytes, its layers one after the other."""

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def read_blocks(self, block_ids: Sequence[int], layers: range, *, on_device: bool) -> list[Stretch]:
        """Views of ``layers`` of blocks, in order; what touches may be one. Of a pool on a device, copies on the host
        unless ``on_device``."""
        ...

    def land(self, block_ids: Sequence[int], layers: range, *, on_device: bool) -> Landing:
        """Room for ``layers`` of these blocks; on the host unless ``on_device``."""
        ...

    @property
    def blank_bytes(self) -> int:
        """How many zeros lie behind the blocks; at least `MAX_PROBE_BYTES`."""
        ...

    def blank(self, start: int, size: int, *, on_device: bool) -> Stretch:
        """``size`` of these zeros, from ``start`` on, which travel as blocks do; on the host unless ``on_device``."""
        ...

    def scratch(self, size: int, *, on_device: bool) -> Stretch:
        """Memory outside the pool, for a payload that is thrown away."""
        ...
