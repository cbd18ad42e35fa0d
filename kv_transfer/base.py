"""The two interfaces of this room.

`KVTransport` moves framed messages between two peers and knows nothing of requests or blocks. `BlockStore` is the
pool as sender and receiver see it (a worker's mapping of its engine's pool satisfies it).

    KVReceiver's side                                KVSender's side
    listen() → endpoint          ←── handshake ───   connect(endpoint) → KVLink
    accept() → KVLink
    link.recv() → Message        ←─── messages ───   link.send(header, payload)
    link.send(header)            ──── answers ───→   link.recv() → Message
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.handoff import KVEndpoint
from core.kv_layout import KVLayout

MAX_PAYLOAD_BYTES = 64 * 2**20
"""Every transport carries payloads up to this; a bigger one is a ValueError of `KVLink.send`."""

MAX_HEADER_BYTES = 64 * 2**10
"""The same for headers."""

Buffer = bytes | bytearray | memoryview
"""Raw host bytes, contiguous. Transports on devices (NCCL) stage internally."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it arrived: a small header (msgpack, checked by whoever reads it) and raw payload bytes."""

    header: bytes
    payload: Buffer


class KVLink(ABC):
    """An ordered two-way pipe of messages with one peer. One task sends and one receives at a time."""

    @abstractmethod
    async def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send one message; the payload's parts are joined on the way. Returns once the transport has taken it (the
        parts may then change), with back-pressure: with a peer that does not receive, it waits. PeerLost if the
        connection is gone, TransferTimeout if the transport's own bound passes. A cancelled or failed send may have
        gone out or not; it no longer reads the parts."""

    @abstractmethod
    async def recv(self) -> Message:
        """The next message; waits for as long as the link lives. PeerLost once the peer is gone and everything it
        sent before has been received."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close both directions, after what was sent is on its way (bounded); the peer sees PeerLost. Closing twice is
        fine, and so is closing while another task sends or receives: it sees PeerLost."""


class KVTransport(ABC):
    """One way of moving messages. An instance serves one worker: it may listen once and connect to many."""

    name: str

    @abstractmethod
    async def listen(self, host: str) -> KVEndpoint:
        """Start to accept links on ``host`` (an address peers can reach), on a port of its own."""

    @abstractmethod
    async def accept(self) -> KVLink:
        """The next link a peer opened; PeerLost once this transport is closed."""

    @abstractmethod
    async def connect(self, endpoint: KVEndpoint, timeout_s: float) -> KVLink:
        """Open a link. TransferTimeout or PeerLost if nobody answers there in time."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop listening and close every link. Closing twice is fine."""


class BlockStore(Protocol):
    """A KV pool as bytes: block i is ``layout.block_bytes`` contiguous bytes."""

    @property
    def layout(self) -> KVLayout:
        """The pool's shape."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> list[Buffer]:
        """Views (or, on a device, staged copies) of whole blocks, in order; adjacent ones may be one buffer."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        """Copy ``data`` (whole blocks, in order) into the pool; returns when it is there."""
        ...
