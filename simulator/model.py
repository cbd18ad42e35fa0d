"""A model whose next token is a function of all tokens before it and of the salt, and whose KV is a chain of hashes of
them. Who reads KV that another request has written, or that was overwritten, notices it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

VOCAB_SIZE = 64
EOS_TOKEN_ID = 0
NUM_LAYERS = 2
SLOT_BYTES = 8
"""Of a token in a layer."""

_MASK = 2**64 - 1


def _next(state: int, token_id: int) -> int:
    state = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return state ^ (state >> 29)


def _token(state: int) -> int:
    return (state >> 20) % VOCAB_SIZE


class Chain:
    """The tokens of a request with ``salt``, and the KV that they must have."""

    def __init__(self, salt: str, token_ids: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._state = zlib.crc32(salt.encode()) + 1
        self._states = [self._state]
        self.rows = [bytearray() for _ in range(NUM_LAYERS)]
        """The KV of each layer, `SLOT_BYTES` per token."""
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Add a token."""
        self.token_ids.append(token_id)
        state = self._state = _next(self._state, token_id)
        self._states.append(state)
        for layer, row in enumerate(self.rows):
            row += ((state + layer) & _MASK).to_bytes(SLOT_BYTES, "little")

    def token_at(self, position: int) -> int:
        """The token that follows the first ``position`` ones."""
        return _token(self._states[position])


def answer(salt: str, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool) -> list[int]:
    """What the model answers."""
    state, found = zlib.crc32(salt.encode()) + 1, list[int]()
    for token_id in prompt:
        state = _next(state, token_id)
    while len(found) < max_tokens:
        found.append(_token(state))
        if found[-1] == EOS_TOKEN_ID and not ignore_eos:
            break
        state = _next(state, found[-1])
    return found
