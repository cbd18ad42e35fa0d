"""Fewer bytes for KV on thin links (`transfer.codec`). The sender codes the payload of a message, and the receiver
decodes it on its way into the pool; checksums cover what travels.

``lossless``: the exponents of bfloat16 numbers that lie together are much alike. Of each page of numbers the largest
exponent is sent, and of each number, in 4 bits, by how much its own is smaller. So 16 bits become 12, and bits are the
same after decoding.

``int8``: the numbers of a head become integers from -127 to 127, with one scale for each head and token. So 16 bits
become 8.25 at a head of 64 numbers, and values differ by at most 0.8 % of the head's largest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from pdserve.core.config import CodecName
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BYTES, KVLayout

_PAGE = 1024
"""Numbers with a common largest exponent."""
_CHUNK = 64 * _PAGE
"""Numbers that are coded at once, in the processor's caches."""
_FAR, _ZERO = 14, 15
"""Of 4 bits: the exponent is so much smaller or more, and is sent beside the others; it is 0."""


class Codec(ABC):
    """Codes payloads of whole numbers, which are views of host memory."""

    name: CodecName

    @abstractmethod
    def encode(self, parts: Sequence[memoryview]) -> memoryview:
        """The coded bytes of a payload."""

    @abstractmethod
    def decode(self, coded: memoryview, size: int) -> memoryview:
        """The ``size`` bytes of a payload. ValueError if ``coded`` is not one of this size."""


class Lossless(Codec):
    """``lossless``, of bfloat16 numbers. In this order: the largest exponent of each page, the 4 bits of each number,
    mantissa and sign of each number, and the exponents that 4 bits do not tell."""

    name = "lossless"

    def encode(self, parts: Sequence[memoryview]) -> memoryview:
        """See `Codec`."""
        numbers = _joined(parts).view(np.uint16)
        *ends, size = _ends(len(numbers))
        coded = np.empty(size, np.uint8)
        largest, packed, others = np.split(coded, ends)
        far = []
        for start in range(0, len(numbers), _CHUNK):
            part = numbers[start : start + _CHUNK]
            turned = ((part << 1) | (part >> 15)).view(np.uint8)  # the exponent is a byte then
            others[start : start + len(part)] = turned[0::2]
            exponents = np.zeros(_padded(len(part)), np.uint8)
            exponents[: len(part)] = turned[1::2]
            pages = exponents.reshape(-1, _PAGE)
            highest = np.maximum(pages.max(axis=1), _FAR)
            codes = np.minimum(highest[:, None] - pages, _FAR)
            codes += (pages == 0).view(np.uint8)
            pairs = codes.reshape(-1).view(np.uint16)
            largest[start // _PAGE :][: len(highest)] = highest
            packed[start // 2 :][: len(pairs)] = pairs | (pairs >> 4)
            far.append(exponents[np.flatnonzero(codes == _FAR)])
        return np.concatenate([coded, *far]).data

    def decode(self, coded: memoryview, size: int) -> memoryview:
        """See `Codec`."""
        data, ends = np.frombuffer(coded, dtype=np.uint8), _ends(size // 2)
        if len(data) < ends[-1]:
            raise ValueError(f"{len(data)} coded bytes for {size // 2} numbers")
        largest, packed, others, far = np.split(data, ends)
        numbers, used = np.empty(size // 2, np.uint16), 0
        for start in range(0, len(numbers), _CHUNK):
            part = numbers[start : start + _CHUNK]
            padded = _padded(len(part))
            pairs = packed[start // 2 :][: padded // 2].astype(np.uint16)
            codes = ((pairs | (pairs << 4)) & 0x0F0F).view(np.uint8)
            highest = largest[start // _PAGE :][: padded // _PAGE]
            exponents = (highest[:, None] - codes.reshape(-1, _PAGE)).reshape(-1)
            exponents *= (codes != _ZERO).view(np.uint8)
            apart = np.flatnonzero(codes == _FAR)
            if used + len(apart) > len(far):
                break
            exponents[apart] = far[used : used + len(apart)]
            used += len(apart)
            turned = part.view(np.uint8)
            turned[0::2] = others[start : start + len(part)]
            turned[1::2] = exponents[: len(part)]
            part[:] = (part >> 1) | (part << 15)
        else:
            if used == len(far):
                return numbers.view(np.uint8).data
        raise ValueError(f"{len(far)} exponents beside the others, which are not as many as the others tell")


def _padded(count: int) -> int:
    """So many numbers, in whole pages."""
    return -(-count // _PAGE) * _PAGE


def _ends(count: int) -> tuple[int, int, int]:
    """Where the three parts of fixed size of so many numbers end."""
    padded = _padded(count)
    end = padded // _PAGE + padded // 2
    return padded // _PAGE, end, end + count


class Int8(Codec):
    """``int8``, of numbers of type ``dtype``, with a scale for each ``group`` of numbers: the upper halves of the
    scales as float32, then the integers. Numbers that are not finite, which engines do not have, lose their value."""

    name = "int8"

    def __init__(self, dtype: str, group: int) -> None:
        self._dtype, self._group = dtype, group
        self._at_once = max(1, _CHUNK // group)

    def encode(self, parts: Sequence[memoryview]) -> memoryview:
        """See `Codec`."""
        stored = _joined(parts).view(np.uint16 if self._dtype == "bfloat16" else self._dtype).reshape(-1, self._group)
        coded = np.empty(2 * len(stored) + stored.size, np.uint8)
        scales = coded[: 2 * len(stored)].view(np.uint16)
        integers = coded[2 * len(stored) :].view(np.int8).reshape(stored.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(stored), self._at_once):
                here = slice(start, start + self._at_once)
                floats = self._floats(stored[here])
                largest = np.abs(floats).max(axis=1)
                upper = ((largest / 127).view(np.uint32) + 0xFFFF) >> 16  # rounded up, so that none is above 127
                scales[here] = upper
                upper[upper == 0] = 1
                integers[here] = np.rint(floats / (upper << 16).view(np.float32)[:, None])
        return coded.data

    def decode(self, coded: memoryview, size: int) -> memoryview:
        """See `Codec`."""
        count = size // DTYPE_BYTES[self._dtype]
        num_groups = count // self._group
        if len(coded) != 2 * num_groups + count:
            raise ValueError(f"{len(coded)} coded bytes for {count} numbers")
        upper = np.frombuffer(coded[: 2 * num_groups], dtype=np.uint16)
        integers = np.frombuffer(coded[2 * num_groups :], dtype=np.int8).reshape(num_groups, self._group)
        data = np.empty(size, np.uint8)
        stored = data.view(np.uint16 if self._dtype == "bfloat16" else self._dtype).reshape(integers.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, num_groups, self._at_once):
                here = slice(start, start + self._at_once)
                scales = (upper[here].astype(np.uint32) << 16).view(np.float32)
                floats = integers[here] * scales[:, None]
                if self._dtype == "bfloat16":
                    bits = floats.view(np.uint32)
                    stored[here] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
                else:
                    stored[here] = floats
        return data.data

    def _floats(self, stored: np.ndarray) -> np.ndarray:
        """Numbers of the pool, as float32."""
        if self._dtype == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)


def codec_of(name: CodecName, layout: KVLayout) -> Codec | None:
    """The codec ``name`` for the pool of a layout; None for ``none``. ConfigError if it does not code its numbers."""
    if name == "lossless":
        if layout.dtype != "bfloat16":
            raise ConfigError(f"transfer.codec: lossless is for KV caches in bfloat16; this one is {layout.dtype}")
        return Lossless()
    if name == "int8":
        if layout.dtype not in DTYPE_BYTES:
            raise ConfigError(f"transfer.codec: the KV cache is {layout.dtype}, which int8 would not make smaller")
        return Int8(layout.dtype, math.gcd(*(cache.head_dim for cache in layout.caches)))
    return None


def _joined(parts: Sequence[memoryview]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays or [np.empty(0, np.uint8)])
