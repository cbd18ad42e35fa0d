"""What the two ends of a hand-off tell each other and the router: where blocks go, and the proof that they came."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """Where a receiver listens for KV: a transport's name and its address (``host:port``, or a name within a host)."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class KVPeer:
    """A worker at the other end of a KV link: ``epoch`` identifies its incarnation, ``endpoints`` are where it
    listens (best first)."""

    worker_id: str
    epoch: str
    endpoints: tuple[KVEndpoint, ...]


class FirstToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels behind the last block of a hand-off: prefill's token, and whether it ends the request."""

    token_id: int
    ends_here: bool


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A link that a sender has to a receiver: its transport, why this one, and what it moved at best when it was opened
    (10^9 bytes per second; 0: not measured)."""

    worker_id: str
    transport: str
    reason: str
    ceiling_gbs: float


class TransferProof(msgspec.Struct, frozen=True):
    """The receiver's account of one hand-off, all of it counted where the bytes arrived.

    ``kv_bytes`` verified and in the pool; ``kv_bytes_retried`` received but thrown away (failed checksum, duplicate).
    Times are durations of the receiver's clock, except ``export_ms``:

    - ``export_ms``: the sender read and hashed the blocks (and brought them to the host, if they lay on a device);
    - ``wire_ms``: the receiver moved their bytes, from each message's header to its payload's end, summed up;
    - ``import_ms``: the receiver hashed them (and brought them to its device);
    - ``span_ms``: first message's arrival to last block verified, waiting for the prefill included;
    - ``request_to_ready_ms``: blocks allocated to last block verified.

    What the hand-off added to the request's latency is none of these but the stage ``kv_exposed``.
    ``ceiling_gbs`` is what the link moved at best when it was measured at the handshake (0: not measured), in 10^9
    bytes per second.
    """

    transport: str
    kv_bytes: int
    kv_bytes_retried: int
    blocks_received: int
    blocks_skipped: int
    messages: int
    checksum: str  # "xxh3-64 verified" or "off"
    export_ms: float
    wire_ms: float
    import_ms: float
    span_ms: float
    request_to_ready_ms: float
    ceiling_gbs: float

    @property
    def gbs(self) -> float:
        """What was achieved: 10^9 bytes per second of ``wire_ms + import_ms`` (while one message is hashed the next
        queues in the kernel, so either alone would flatter); 0 if nothing travelled."""
        busy_ms = self.wire_ms + self.import_ms
        return self.kv_bytes / busy_ms / 1e6 if busy_ms else 0.0

    @property
    def share_of_ceiling(self) -> float | None:
        """``gbs`` over ``ceiling_gbs``; None if nothing travelled or nothing was measured."""
        return self.gbs / self.ceiling_gbs if self.ceiling_gbs and self.gbs else None
