"""Counter-based uniform numbers: each is a function of its key alone, so rows of a batch share no generator.

The first number of a position is a hash of (seed, position). Those of further turns are its successors in SplitMix64,
which kernels compute by themselves (`engine.kernels.cuda_top_p`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def first_bits(seed: int, position: int) -> int:
    """The 64 bits of turn 0 at ``position`` of a request with ``seed``, both in 0 to 2**64-1."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position))


def uniform(seed: int, position: int, turn: int = 0) -> float:
    """The number in [0, 1), a multiple of 2**-53, of turn ``turn`` at ``position`` of a request with ``seed``. ``seed``
    and ``position`` are in 0 to 2**64-1."""
    bits = first_bits(seed, position)
    if turn:
        bits = (bits + turn * INCREMENT) & _MASK
        bits = ((bits ^ (bits >> 30)) * MULTIPLIERS[0]) & _MASK
        bits = ((bits ^ (bits >> 27)) * MULTIPLIERS[1]) & _MASK
        bits ^= bits >> 31
    return float(bits >> 11) * 2.0**-53


def uniforms(keys: Sequence[tuple[int, int]], turn: int) -> list[float]:
    """`uniform` for each (seed, position) of ``keys``."""
    return [uniform(seed, position, turn) for seed, position in keys]
