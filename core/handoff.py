"""What the two ends of a hand-off tell each other and the router: where blocks go, and the proof that they came."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """Where a receiver listens for KV: a transport's name and its address (``host:port``, or a name for loopback)."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class KVDestination:
    """Decode's answer to a reservation. ``epoch`` identifies the receiver's incarnation and ``nonce`` this one
    reservation: a message that carries others is refused. The prompt's first ``num_skipped`` blocks are held already
    and must not be sent; of the remaining, the i-th goes into slot ``num_skipped + i`` of ``num_blocks``.
    The receiver alone knows which physical blocks these are."""

    worker_id: str
    endpoint: KVEndpoint
    epoch: str
    nonce: str
    num_blocks: int
    num_skipped: int

    def to_wire(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> KVDestination:
        """The destination that `to_wire` described."""
        return cls(**{**data, "endpoint": KVEndpoint(**data["endpoint"])})


@dataclass(frozen=True, slots=True)
class TransferProof:
    """The receiver's account of one hand-off, all of it counted where the bytes arrived.

    ``kv_bytes`` verified and in the pool; ``kv_bytes_retried`` received but thrown away (failed checksum, duplicate);
    ``wire_ms`` first message's arrival to last block verified; ``request_to_ready_ms`` reservation to last block
    verified. Times are durations on the receiver's clock.
    """

    transport: str
    kv_bytes: int
    kv_bytes_retried: int
    blocks_received: int
    blocks_skipped: int
    messages: int
    checksum: str  # "xxh3-64 verified" or "off"
    wire_ms: float
    request_to_ready_ms: float
