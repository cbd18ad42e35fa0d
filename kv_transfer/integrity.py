"""What the two ends say to each other, and the checks on it.

    sender                                              receiver
    Hello      epoch it means to talk to, model   ──▶   HelloOk, or Refused
    Probe      payload, thrown away               ──▶   Probed: how long it took to take
    Open       a hand-off begins or still lives   ──▶   Ack with seq 0
    Blocks     seq 1, 2, 3 ...; payload           ──▶   Ack once it is in the pool, or Refused
    Abort      it gave up                        ◀──▶   Abort: it gave up

A header is a msgpack map of ``type`` and exactly the fields of one of these classes, each of the right type and range;
anything else is refused. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import msgpack
import xxhash

from kv_transfer.base import Buffer
from pdserve.core.errors import ChecksumMismatch, LayoutMismatch, TransferError, TransferRefused, from_wire
from pdserve.core.kv_layout import DTYPE_BYTES, KVLayout

MAX_TRAILER_BYTES = 4096
MAX_EOS_TOKEN_IDS = 1024
MAX_RESENDS = 2
"""How often a message is sent again after a failed checksum."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a link: who calls, which incarnation of the receiver it knows, and what both ends must have
    alike: the pool's layout, whether messages are hashed, and the model's end-of-sequence ids (ascending)."""

    worker_id: str
    epoch: str
    layout: dict[str, Any]
    checksums: bool
    eos_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class HelloOk:
    """The receiver's answer: it is this worker in this incarnation, and what must be alike is."""

    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The payload measures the link, and is thrown away."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The receiver took the payload of a `Probe` in so many microseconds."""

    micros: int


@dataclass(frozen=True, slots=True)
class Open:
    """The sender has the hand-off in hand; repeated as its heartbeat while blocks are computed."""

    nonce: str
    epoch: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """The payload is ``num_layers`` layers, from ``first_layer``, of ``num_blocks`` blocks for the slots from
    ``first_slot``, block by block. ``export_us``: what the hand-off has cost its sender so far, in microseconds of
    reading and hashing. ``last`` and ``trailer`` close it."""

    nonce: str
    epoch: str
    request_id: str
    seq: int
    first_slot: int
    num_blocks: int
    first_layer: int
    num_layers: int
    checksum: int
    export_us: int
    last: bool
    trailer: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """This message's blocks are verified and in the pool."""

    nonce: str
    seq: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A message changed nothing; ``kind`` and ``message`` are of `pdserve.core.errors.to_wire`. Nonce "": the link."""

    nonce: str
    seq: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The end that says this has given the hand-off up."""

    nonce: str
    kind: str
    message: str


Header = Hello | HelloOk | Probe | Probed | Open | Blocks | Ack | Refused | Abort


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


def checksum(payload: Sequence[Buffer], trailer: bytes) -> int:
    """xxh3-64 over the payload's parts and the trailer."""
    digest = xxhash.xxh3_64()
    for part in payload:
        digest.update(part)
    digest.update(trailer)
    return digest.intdigest()


def encode(header: Header) -> bytes:
    """The wire form of a header."""
    kind = type(header)
    packed: bytes = msgpack.packb({"type": _NAMES[kind], **{name: getattr(header, name) for name in _FIELDS[kind]}})
    return packed


def decode(data: bytes) -> Header:
    """The header that `encode` made; `TransferRefused` says what is wrong with any other bytes."""
    try:
        values = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise TransferRefused(f"malformed header: not msgpack ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("type"), str):
        raise TransferRefused("malformed header: not a map with a type")
    header = _TYPES.get(name := values.pop("type"))
    if header is None:
        raise TransferRefused(f"malformed header: unknown type {name[:32]!r}")
    names = _FIELDS[header]
    if values.keys() != names:
        wrong = sorted(repr(field)[:32] for field in values.keys() ^ names)
        raise TransferRefused(f"malformed header: {name} with missing or unknown fields {', '.join(wrong[:8])}")
    for field, value in values.items():
        if not _CHECKS[field](value):
            raise TransferRefused(f"malformed header: {name}.{field} has a wrong type or range")
    made: Header = header(**values)
    return made


def peer_error(kind: str, message: str) -> TransferError:
    """What a peer's error means here: the same error if the transfer failed, a plain `TransferError` otherwise (its own
    cancellation, say, is not ours)."""
    error = from_wire(kind, message)
    return error if isinstance(error, TransferError) else TransferError(message)


def _text(limit: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and len(value) <= limit


def _number(limit: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < limit


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_EOS_TOKEN_IDS and all(map(_number(2**32), value))


def _is_layout(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {f.name for f in fields(KVLayout)}
        and _text(256)(value["model_hash"])
        and _text(32)(value["dtype"])
        and value["dtype"] in DTYPE_BYTES
        and all(_number(2**31)(value[name]) for name in value.keys() - {"model_hash", "dtype"})
    )


_TYPES: dict[str, type[Any]] = {
    "hello": Hello, "hello_ok": HelloOk, "probe": Probe, "probed": Probed, "open": Open, "blocks": Blocks, "ack": Ack,
    "refused": Refused, "abort": Abort,
}  # fmt: skip
_NAMES: dict[type[Any], str] = {header: name for name, header in _TYPES.items()}
_FIELDS: dict[type[Any], Set[str]] = {header: {f.name: None for f in fields(header)}.keys() for header in _NAMES}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "worker_id": _text(256),
    "epoch": _text(256),
    "nonce": _text(64),
    "request_id": _text(512),
    "kind": _text(64),
    "message": _text(8192),
    "layout": _is_layout,
    "eos_token_ids": _are_token_ids,
    "checksums": lambda value: type(value) is bool,
    "checksum": _number(2**64),
    "seq": _number(2**32),
    "first_slot": _number(2**32),
    "num_blocks": _number(2**32),
    "first_layer": _number(2**16),
    "num_layers": _number(2**16),
    "export_us": _number(2**48),
    "micros": _number(2**48),
    "last": lambda value: type(value) is bool,
    "trailer": lambda value: type(value) is bytes and len(value) <= MAX_TRAILER_BYTES,
}
