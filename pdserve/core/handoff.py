"""Values about hand-offs that workers and the router exchange: endpoints, links, token 1, and the proof."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """Where a receiver listens: a transport's name and an address (``host:port``, or a name within a host)."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class KVPeer:
    """A worker at the other end of a KV link. ``epoch`` identifies its incarnation. ``endpoints`` are best first."""

    worker_id: str
    epoch: str
    endpoints: tuple[KVEndpoint, ...]


class FirstToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The trailer of a hand-off: token 1, and whether it ends the request."""

    token_id: int
    ends_here: bool


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A sender's link to a receiver: the transport, the reason for choosing it, and the best rate of the probes when
    the link was opened (10^9 bytes per second; 0: not measured)."""

    worker_id: str
    transport: str
    reason: str
    ceiling_gbs: float


class TransferProof(msgspec.Struct, frozen=True):
    """The receiver's measurements of one hand-off.

    ``kv_bytes`` are verified and in the pool; ``kv_bytes_retried`` were received and dropped (failed checksum, or
    duplicate). Times are durations on the receiver's clock, except ``export_ms``:

    - ``export_ms``: the sender read and hashed the blocks, and copied them from its device to the host;
    - ``wire_ms``: the receiver moved the bytes, from each message's header to the end of its payload, in total;
    - ``import_ms``: the receiver hashed the blocks, and copied them to its device;
    - ``span_ms``: from the first message to the last verified block, including waits for the prefill;
    - ``request_to_ready_ms``: from the allocation of the blocks to the last verified block.

    The latency that the hand-off adds to the request is the stage ``kv_exposed``, which is not among these.
    ``ceiling_gbs`` is the best rate of the probes at the handshake, in 10^9 bytes per second (0: not measured).
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
        """The rate over ``wire_ms + import_ms``, in 10^9 bytes per second; 0 if nothing was sent. Either time alone
        would be too short, because the next message arrives while one is hashed."""
        busy_ms = self.wire_ms + self.import_ms
        return self.kv_bytes / busy_ms / 1e6 if busy_ms else 0.0

    @property
    def share_of_ceiling(self) -> float | None:
        """``gbs`` over ``ceiling_gbs``; None if nothing was sent or measured."""
        return self.gbs / self.ceiling_gbs if self.ceiling_gbs and self.gbs else None
