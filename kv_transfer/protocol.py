"""What the two ends say to each other, and the checks on it.

    sender                                              receiver
    Hello      epoch it means to talk to, model   ──▶   HelloOk, or Refused
    Probe      payload without KV                 ──▶   Probed: how long it took to take
    (holds the request's blocks)                 ◀──    Announce: where they go; the sender need not know of it yet
    Open       a hand-off begins or still lives   ──▶   Ack with seq 0
    Blocks     seq 1, 2, 3 ...; payload           ──▶   Ack once it is in the pool, or Refused
    Confirm    it held all blocks until then      ──▶   (on links that need it)
    Abort      it gave up                        ◀──▶   Abort: it gave up

A header is one of these structs as msgpack: a list of its class's name and exactly its fields, each of the right type
and range. Anything else is refused. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import xxhash

from pdserve.core.errors import ChecksumMismatch, LayoutMismatch, TransferError, TransferRefused, from_wire
from pdserve.core.kv_layout import KVLayout

MAX_TRAILER_BYTES = 4096
MAX_EOS_TOKEN_IDS = 1024
_MAX_REASON_CHARS = 200
MAX_RESENDS = 2
"""How often a message is sent again after a failed checksum."""


Id = Annotated[str, msgspec.Meta(max_length=256)]
AttemptId = Annotated[str, msgspec.Meta(max_length=512)]
Nonce = Annotated[str, msgspec.Meta(max_length=64)]
ErrorKind = Annotated[str, msgspec.Meta(max_length=64)]
ErrorMessage = Annotated[str, msgspec.Meta(max_length=8192)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Micros = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
EosTokenIds = Annotated[list[Count], msgspec.Meta(max_length=MAX_EOS_TOKEN_IDS)]
Trailer = Annotated[bytes, msgspec.Meta(max_length=MAX_TRAILER_BYTES)]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Header, frozen=True):
    """The first message of a link: who calls, which incarnation of the receiver it knows, and what both ends must have
    alike: the pool's layout, whether messages are hashed, and the model's end-of-sequence ids (ascending)."""

    worker_id: Id
    epoch: Id
    layout: KVLayout
    checksums: bool
    eos_token_ids: EosTokenIds


class HelloOk(_Header, frozen=True):
    """The receiver's answer: it is this worker in this incarnation, what must be alike is, and this is its pool's
    layout."""

    worker_id: Id
    epoch: Id
    layout: KVLayout


class Probe(_Header, frozen=True):
    """The payload measures the link: it goes from probe area to probe area (`kv_transfer.pool.Pool.probe`)."""


class Probed(_Header, frozen=True):
    """The receiver took the payload of a `Probe` in so many microseconds."""

    micros: Micros


class Announce(_Header, frozen=True):
    """The receiver has room for a request's ``num_blocks`` blocks, of which it holds the first ``num_skipped`` already.
    ``nonce`` names this one hand-off: messages that carry another are refused. The i-th of the remaining blocks goes
    into slot ``num_skipped + i``; the receiver alone knows which physical blocks these are."""

    attempt_id: AttemptId
    nonce: Nonce
    num_blocks: Count
    num_skipped: Count


class Open(_Header, frozen=True):
    """The sender has the hand-off in hand; repeated as its heartbeat while blocks are computed."""

    nonce: Nonce
    epoch: Id
    attempt_id: AttemptId


class Blocks(_Header, frozen=True):
    """The payload is ``num_layers`` layers, from ``first_layer``, of ``num_blocks`` blocks for the slots from
    ``first_slot``, block by block. ``export_us``: what the hand-off has cost its sender so far, in microseconds of
    reading and hashing. ``last`` and ``trailer`` close it."""

    nonce: Nonce
    epoch: Id
    attempt_id: AttemptId
    seq: Count
    first_slot: Count
    num_blocks: Count
    first_layer: Count
    num_layers: Count
    checksum: Annotated[int, msgspec.Meta(ge=0)]
    export_us: Micros
    last: bool
    trailer: Trailer


class Ack(_Header, frozen=True):
    """This message's blocks are verified and in the pool."""

    nonce: Nonce
    seq: Count


class Confirm(_Header, frozen=True):
    """The sender still held the blocks when everything was acknowledged. It is sent, and waited for, on links whose
    receiver may read late and does not hash (`KVLink.reads_late`)."""

    nonce: Nonce


class Refused(_Header, frozen=True):
    """A message changed nothing; ``kind`` and ``message`` are of `pdserve.core.errors.to_wire`. Nonce "": the link."""

    nonce: Nonce
    seq: Count
    kind: ErrorKind
    message: ErrorMessage


class Abort(_Header, frozen=True):
    """The end that says this has given the hand-off up."""

    nonce: Nonce
    kind: ErrorKind
    message: ErrorMessage


Header = Hello | HelloOk | Probe | Probed | Announce | Open | Blocks | Ack | Confirm | Refused | Abort


class Reason(StrEnum):
    """Why a receiver refuses a message; the keys of its counters."""

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
    """A message is refused for ``reason``; ``error`` is what its sender is told."""

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


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """The wire form of a header."""
    return _encoder.encode(header)


def decode(data: bytes) -> Header:
    """The header that `encode` made; `TransferRefused` says what is wrong with any other bytes."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # not UTF-8; nested too deep
        raise TransferRefused(f"malformed header: {str(error)[:_MAX_REASON_CHARS]}") from None


def peer_error(kind: str, message: str) -> TransferError:
    """What a peer's error means here: the same error if the transfer failed, a plain `TransferError` otherwise (its own
    cancellation, say, is not ours)."""
    error = from_wire(kind, message)
    return error if isinstance(error, TransferError) else TransferError(message)
