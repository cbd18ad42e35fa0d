"""The messages of a KV link, and their encoding.

    sender                                              receiver
    Hello      epoch of the receiver, layout      ──▶   HelloOk, or Refused
    Probe      payload without KV                 ──▶   Probed: how long a train of them took
    (may not have the request yet)               ◀──    Announce: where the blocks go
    Open       the hand-off begins, or goes on    ──▶   Ack with seq 0
    Blocks     seq 1, 2, 3 ...; payload           ──▶   Ack once it is in the pool, or Refused
    (keeps the link's ceiling)                   ◀──    Rated: the hand-off was faster than the ceiling
    Confirm    the blocks were held until now     ──▶   (only on links that need it)
    Abort                                        ◀──▶   Abort

A header is one of these structs as msgpack: a list of the class's name and its fields, each of the right type and
range. Anything else is refused. Nothing is unpickled.

``sent_us`` is the time at which the sender begins to send the message, in microseconds of its monotonic clock. The
receiver times the link by it (`kv_transfer.link_rate`); nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import xxhash

from contract.message import Message
from pdserve.core.config import CodecName
from pdserve.core.errors import ChecksumMismatch, LayoutMismatch, TransferError, TransferRefused, from_wire
from pdserve.core.kv_layout import KVLayout

MAX_TRAILER_BYTES = 4096
MAX_EOS_TOKEN_IDS = 1024
_MAX_REASON_CHARS = 200
MAX_RESENDS = 2
"""Limit: times that a message is sent again after a wrong checksum. Then: `transfer.on_kv_failure`."""

Id = Annotated[str, msgspec.Meta(max_length=256)]
AttemptId = Annotated[str, msgspec.Meta(max_length=512)]
Nonce = Annotated[str, msgspec.Meta(max_length=64)]
ErrorKind = Annotated[str, msgspec.Meta(max_length=64)]
ErrorMessage = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Micros = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
BytesPerS = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
EosTokenIds = Annotated[list[Count], msgspec.Meta(max_length=MAX_EOS_TOKEN_IDS)]
Trailer = Annotated[bytes, msgspec.Meta(max_length=MAX_TRAILER_BYTES)]


class Hello(Message, frozen=True):
    """The first message of a link: the sender's id, the receiver's epoch as the sender knows it, and what both ends
    must agree on: the pool's layout, whether messages are hashed, and the model's end-of-sequence ids (ascending).
    ``codec`` is how the sender codes the payloads of `Blocks` (`kv_transfer.codec`)."""

    worker_id: Id
    epoch: Id
    layout: KVLayout
    checksums: bool
    eos_token_ids: EosTokenIds
    codec: CodecName = "none"


class HelloOk(Message, frozen=True):
    """The receiver accepts the link. ``layout`` is that of its pool."""

    worker_id: Id
    epoch: Id
    layout: KVLayout


class Probe(Message, frozen=True):
    """Measures the link (`kv_transfer.link_rate`): the payload goes from one probe area to the other
    (`kv_transfer.pool.Pool.probe`). ``left`` more probes of the same train follow."""

    sent_us: Micros
    left: Count


class Probed(Message, frozen=True):
    """The receiver has fetched a train of probes, which took ``micros`` microseconds. ``ceiling`` is the link's."""

    micros: Micros
    ceiling: BytesPerS


class Rated(Message, frozen=True):
    """A hand-off has raised the link's ceiling."""

    ceiling: BytesPerS


class Announce(Message, frozen=True):
    """The receiver has room for a prompt's ``num_blocks`` blocks, the first ``num_skipped`` of which it holds already.

    ``nonce`` names the hand-off; messages with another one are refused. The i-th of the remaining blocks goes into slot
    ``num_skipped + i``. Of a cached prefix the sender may have only the first blocks; its last message then ends the
    transfer early. Only the receiver knows which blocks of its pool the slots are."""

    attempt_id: AttemptId
    nonce: Nonce
    num_blocks: Count
    num_skipped: Count


class Open(Message, frozen=True):
    """The sender begins the hand-off. It is repeated as a heartbeat until the hand-off ends."""

    nonce: Nonce
    epoch: Id
    attempt_id: AttemptId
    sent_us: Micros


class Blocks(Message, frozen=True):
    """The payload is ``num_layers`` layers, from ``first_layer``, of ``num_blocks`` blocks for the slots from
    ``first_slot``, block by block. With a codec, a payload that is smaller than these is coded. ``export_us`` is
    the time in microseconds that the sender has spent on reading, coding and hashing since the hand-off began. ``last``
    marks the last message, which may have a ``trailer``."""

    nonce: Nonce
    epoch: Id
    attempt_id: AttemptId
    sent_us: Micros
    seq: Count
    first_slot: Count
    num_blocks: Count
    first_layer: Count
    num_layers: Count
    checksum: Annotated[int, msgspec.Meta(ge=0)]
    export_us: Micros
    last: bool
    trailer: Trailer


class Ack(Message, frozen=True):
    """The blocks of message ``seq`` are verified and in the pool."""

    nonce: Nonce
    seq: Count


class Confirm(Message, frozen=True):
    """The sender still held the blocks when everything was acknowledged. Required on links whose receiver may read late
    (`KVLink.reads_late`) and does not hash."""

    nonce: Nonce


class Refused(Message, frozen=True):
    """Message ``seq`` was refused, or the link if ``nonce`` is empty. ``kind`` and ``message`` are those of
    `pdserve.core.errors.to_wire`."""

    nonce: Nonce
    seq: Count
    kind: ErrorKind
    message: ErrorMessage


class Abort(Message, frozen=True):
    """The hand-off has ended at the end that sends this."""

    nonce: Nonce
    kind: ErrorKind
    message: ErrorMessage


Header = Hello | HelloOk | Probe | Probed | Rated | Announce | Open | Blocks | Ack | Confirm | Refused | Abort


class Reason(StrEnum):
    """Why a receiver refuses a message, or (unproven) its transport a peer; the keys of its counters."""

    UNPROVEN = "unproven"
    MALFORMED = "malformed"
    LAYOUT = "layout"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN_NONCE = "unknown_nonce"
    WRONG_REQUEST = "wrong_request"
    WRONG_LINK = "wrong_link"
    REORDERED = "reordered"
    DUPLICATE = "duplicate"
    OUT_OF_BOUNDS = "out_of_bounds"
    WRONG_SIZE = "wrong_size"
    CHECKSUM = "checksum"
    INCOMPLETE = "incomplete"


class Refusal(Exception):
    """A message is refused for ``reason``. ``error`` is the error that its sender is told."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        kinds: dict[Reason, type[TransferError]] = {
            Reason.LAYOUT: LayoutMismatch,
            Reason.CHECKSUM: ChecksumMismatch,
        }
        self.reason = reason
        self.error = kinds.get(reason, TransferRefused)(message)


def checksum(payload: Sequence[memoryview], trailer: bytes) -> int:
    """xxh3-64 over the payload's parts and the trailer."""
    digest = xxhash.xxh3_64()
    for part in payload:
        digest.update(part)
    digest.update(trailer)
    return digest.intdigest()


_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def decode(data: bytes) -> Header:
    """The header in ``data``. TransferRefused if it is malformed."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # not UTF-8; nested too deep
        raise TransferRefused(f"malformed header: {str(error)[:_MAX_REASON_CHARS]}") from None


def peer_error(kind: str, message: str) -> TransferError:
    """A peer's error, as an error of this end. Errors that are no `TransferError`, such as a cancellation at the peer,
    become a plain `TransferError`."""
    error = from_wire(kind, message)
    return error if isinstance(error, TransferError) else TransferError(message)
