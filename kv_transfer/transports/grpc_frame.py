"""The encoding of messages as frames of a gRPC stream.

A frame is the protobuf message ``Frame { bytes data = 1; }``, encoded here to save two copies. The first frame of a
message has the lengths of header and payload (4 bytes each, little endian), the header, and the beginning of the
payload; further frames have only payload. Frames have at most about 2 MiB, because gRPC is slower with larger ones.
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
    """The frames of one message. Reads the payload's parts frame by frame."""
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
    """The messages in a stream of frames. ValueError if the frames are malformed. The payload of a message of one frame
    is a view of the frame. ``check`` gets the sizes of header and payload before memory is allocated for the message,
    and may raise ValueError."""
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
            # The first frame's time is unknown, and counted at the rate of the others.
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
