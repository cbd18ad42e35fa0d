"""How messages become frames of a gRPC stream, and messages again.

A frame is the protobuf message ``Frame { bytes data = 1; }``, made by hand to save two copies. The data of a message's
first frame is the header's length and the payload's (4 bytes each, little endian), the header, and payload; that of
further frames is payload alone. Frames are about 2 MiB at most, because gRPC is several times slower with large ones.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from kv_transfer.fetch import Payload
from kv_transfer.transports.inbox import Arrived, check_sizes

FRAME_BYTES = 2 * 2**20
_DATA_FIELD = 0x0A
_LENGTHS = struct.Struct("<II")


def encode(header: bytes, payload: Payload) -> Iterator[bytes]:
    """The frames of one message. The payload's parts are read frame by frame."""
    size = check_sizes(header, payload)
    pieces: list[bytes | memoryview] = [_LENGTHS.pack(len(header), size), header]
    room = FRAME_BYTES
    for part in payload.parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            if not room:
                yield _frame(pieces)
                pieces, room = [], FRAME_BYTES
            pieces.append(rest[:room])
            rest, room = rest[room:], room - min(room, rest.nbytes)
    yield _frame(pieces)


def decode(frames: Iterable[bytes], check: Callable[[int, int], None] = lambda *_: None) -> Iterator[Arrived]:
    """The messages in a stream of frames; ValueError if these are other bytes. A message of one frame is a view.
    ``check`` may refuse a message by the sizes of header and payload, before there is memory for it."""
    stream = iter(frames)
    for frame in stream:
        data = _data(frame)
        if data.nbytes < _LENGTHS.size:
            raise ValueError("a message without lengths")
        header_size, size = _LENGTHS.unpack_from(data)
        if header_size > MAX_HEADER_BYTES or size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {header_size} + {size} bytes")
        check(header_size, size)
        start = _LENGTHS.size + header_size
        header, payload = bytes(data[_LENGTHS.size : start]), data[start:]
        if len(header) < header_size or payload.nbytes > size:
            raise ValueError("a message whose lengths are wrong")
        arrival_s = 0.0
        if payload.nbytes < size:
            first, started_s = payload.nbytes, time.perf_counter()
            payload = _gather(payload, size, stream)
            # The first frame came at once, as far as anybody here can tell: as fast, then, as the others.
            arrival_s = (time.perf_counter() - started_s) * size / (size - first)
        yield Arrived(header, payload, arrival_s)


def _gather(first: memoryview, size: int, stream: Iterator[bytes]) -> memoryview:
    whole = memoryview(bytearray(size))
    whole[: first.nbytes] = first
    filled = first.nbytes
    while filled < size:
        data = _data(next(stream, b""))
        if not 0 < data.nbytes <= size - filled:
            raise ValueError("a message that ends early or late")
        whole[filled : filled + data.nbytes] = data
        filled += data.nbytes
    return whole


def _frame(pieces: Sequence[bytes | memoryview]) -> bytes:
    size = sum(len(piece) for piece in pieces)
    prefix = bytearray((_DATA_FIELD,))
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return b"".join((prefix, *pieces))


def _data(frame: bytes) -> memoryview:
    if not frame or frame[0] != _DATA_FIELD:
        raise ValueError("not a Frame")
    size = 0
    for at, byte in enumerate(frame[1:6]):
        size |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            if size != len(frame) - at - 2:
                raise ValueError("a Frame of another length")
            return memoryview(frame)[at + 2 :]
    raise ValueError("a Frame without a length")
