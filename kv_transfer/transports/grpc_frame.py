"""The encoding of messages as frames of a gRPC stream, which are bytes to gRPC.

The first frame of a message has the lengths of header and payload (4 bytes each, little endian), the header, and the
beginning of the payload; further frames have only payload. Frames have at most about 2 MiB, because gRPC is slower with
larger ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

from kv_transfer.base import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from kv_transfer.fetch import Payload
from kv_transfer.transports.inbox import Arrived, check_sizes

FRAME_BYTES = 2 * 2**20
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
                yield b"".join(pieces)
                pieces, room = [], FRAME_BYTES
            pieces.append(rest[:room])
            rest, room = rest[room:], room - min(room, rest.nbytes)
    yield b"".join(pieces)


def decode(frames: Iterable[bytes], check: Callable[[int, int], None] = lambda *_: None) -> Iterator[Arrived]:
    """The messages in a stream of frames. ValueError if the frames are malformed. The payload of a message of one frame
    is a view of the frame. ``check`` gets the sizes of header and payload before memory is allocated for the message,
    and may raise ValueError."""
    stream = iter(frames)
    for frame in stream:
        data = memoryview(frame)
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
        yield Arrived(header, payload if payload.nbytes == size else _gather(payload, size, stream))


def _gather(first: memoryview, size: int, stream: Iterator[bytes]) -> memoryview:
    whole = memoryview(bytearray(size))
    whole[: first.nbytes] = first
    filled = first.nbytes
    while filled < size:
        data = memoryview(next(stream, b""))
        if not 0 < data.nbytes <= size - filled:
            raise ValueError("a message that ends early or late")
        whole[filled : filled + data.nbytes] = data
        filled += data.nbytes
    return whole
