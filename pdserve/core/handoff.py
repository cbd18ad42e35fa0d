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
    """A worker at the other end of a KV link. ``epoch`` identifies its incarnation. ``endpoints`` are best first.
    ``engine`` describes an engine that is not pdserve's own: names and values, all of which both ends of a hand-off
    must have in common."""

    worker_id: str
    epoch: str
    endpoints: tuple[KVEndpoint, ...]
    engine: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Another worker, which sends the KV of the first ``num_tokens`` tokens of a prompt (whole blocks) to the one that
    computes the prompt. What has not come ``timeout_s`` seconds after the blocks for it were allocated is computed."""

    peer: KVPeer
    num_tokens: int
    timeout_s: float


def prefix_transfer_id(attempt_id: str) -> str:
    """The id of the KV transfer that brings the prefix of an attempt's prompt. No attempt has an id like it."""
    return f"{attempt_id}/prefix"


class FirstToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The trailer of a hand-off: token 1, and whether it ends the request."""

    token_id: int
    ends_here: bool


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A sender's link to a receiver: the transport, the reason for choosing it, and the link's ceiling: the best rate
    so far (10^9 bytes per second; 0: not measured)."""

    worker_id: str
    transport: str
    reason: str
    ceiling_gbs: float


class TransferProof(msgspec.Struct, frozen=True):
    """The receiver's measurements of one hand-off.

    ``kv_bytes`` are verified and in the pool; they took ``wire_bytes`` on the link, fewer if they were coded
    (`transfer.codec`). ``kv_bytes_retried`` were received and dropped (failed checksum, or duplicate). Times are
    durations on the receiver's clock, except ``export_ms``:

    - ``export_ms``: the sender read, coded and hashed the blocks, and copied them from its device to the host;
    - ``wire_ms``: bytes were on their way: from the moment the sender began to send a message until it was in place,
      without ``import_ms``; time that messages share counts once;
    - ``import_ms``: the receiver hashed and decoded the blocks, and copied them to its device;
    - ``span_ms``: from when the first message was sent to the last verified block, including waits for the prefill;
    - ``request_to_ready_ms``: from the allocation of the blocks to the last verified block.

    The latency that the hand-off adds to the request is the stage ``kv_exposed``, which is not among these.
    ``ceiling_gbs`` is the best rate of the link so far, this hand-off included, in 10^9 bytes per second (0: nothing
    was moved or measured).
    """

    transport: str
    kv_bytes: int
    kv_bytes_retried: int
    blocks_received: int
    blocks_skipped: int
    messages: int
    checksum: str  # "xxh3-64 verified", "device-64 verified" (by the GPUs) or "off"
    export_ms: float
    wire_ms: float
    import_ms: float
    span_ms: float
    request_to_ready_ms: float
    ceiling_gbs: float
    wire_bytes: int

    @property
    def gbs(self) -> float:
        """The rate of ``wire_bytes`` over ``wire_ms + import_ms``, in 10^9 bytes per second; 0 if nothing was sent. The
        receiver's module `kv_transfer.link_rate` defines it."""
        busy_ms = self.wire_ms + self.import_ms
        return self.wire_bytes / busy_ms / 1e6 if busy_ms else 0.0


class PrefixFetch(msgspec.Struct, frozen=True):
    """The result of fetching the prefix of a prompt from worker ``source``, by the worker that computes the prompt.

    It lacked ``tokens_wanted`` tokens, and ``tokens`` of them came: fewer if the source no longer had all of them, 0 if
    the fetch failed, with ``failure`` as the reason. It lasted ``duration_ms``, from the allocation of the blocks.
    ``proof``: the transfer's; None if there was none, or it failed.
    """

    source: str
    tokens: int
    tokens_wanted: int
    duration_ms: float
    proof: TransferProof | None = None
    failure: str = ""
