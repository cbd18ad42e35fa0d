"""Damaged requests: random changes of bytes, repeatable by their seed."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Mutator:
    """Makes damaged copies of ``samples``."""

    def __init__(self, samples: Sequence[bytes], seed: int, most_changes: int = 4) -> None:
        self._samples = list(samples)
        self._random, self._most_changes = random.Random(seed), most_changes

    def draw(self) -> bytes:
        """A sample with some random changes, one at least."""
        data = bytearray(self._random.choice(self._samples))
        for _ in range(self._random.randint(1, self._most_changes)):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        draw = self._random
        start, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[draw.randrange(len(data))] = draw.choice((0x00, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == 2:
            del data[start:]
        elif kind == 3:
            data[end:end] = data[start:end] * draw.choice((1, 1, 2, 50))
        elif kind == 4:
            del data[start:end]
        elif kind == 5:
            data[start:start] = draw.randbytes(draw.randint(1, 9))
        else:
            other = draw.choice(self._samples)
            data[start:] = other[draw.randint(0, len(other)) :]


def varint(value: int) -> bytes:
    """A number of up to 64 bits, as protobuf writes it."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def of_length(content: bytes) -> bytes:
    """What follows the tag of a field of bytes."""
    return varint(len(content)) + content
