"""Counter-based uniform numbers: each is a function of its key alone, so rows of a batch share no generator."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash


def uniform(seed: int, position: int, turn: int = 0) -> float:
    """The number in [0, 1), a multiple of 2**-53, of turn ``turn`` at ``position`` of a request with ``seed``. ``seed``
    and ``position`` are in 0 to 2**64-1."""
    key = struct.pack("<QQQ", seed, position, turn) if turn else struct.pack("<QQ", seed, position)
    return float(xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def uniforms(keys: Sequence[tuple[int, int]], turn: int) -> list[float]:
    """`uniform` for each (seed, position) of ``keys``."""
    return [uniform(seed, position, turn) for seed, position in keys]
