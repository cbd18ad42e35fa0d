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
        other = draw.choice(self._samples)
        middle = draw.choice(
            (b"", data[start:end] * 2, data[start:end] * 50, draw.randbytes(draw.randint(1, 9)), other[start:end])
        )
        data[start : draw.choice((start, start + 1, end, len(data)))] = middle


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
