"""A model whose next token is a function of all tokens before it and of the salt, and whose KV is a chain of hashes of
them. Who reads KV that another request has written, or that was overwritten, notices it."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Container, Sequence
from typing import NamedTuple

from pdserve.core.sampling import TokenLogprobs

VOCAB_SIZE = 64
EOS_TOKEN_ID = 0
NUM_LAYERS = 2
SLOT_BYTES = 64
"""Of a token in a layer: so many that a prompt is larger than the smallest message."""

_MASK = 2**64 - 1


def _next(state: int, token_id: int) -> int:
    state = ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return state ^ (state >> 29)


def _token(state: int) -> int:
    return (state >> 20) % VOCAB_SIZE


def _logprobs(state: int) -> TokenLogprobs:
    return TokenLogprobs(-float(state % 97))


class _Prompt(NamedTuple):
    """A chain's states before and after each token of a prompt, and its rows."""

    states: tuple[int, ...]
    rows: tuple[bytes, ...]


@functools.lru_cache(maxsize=1024)
def _prompt(salt: str, token_ids: tuple[int, ...]) -> _Prompt:
    """Several workers compute the same prompt, and those who check its answer."""
    states = [zlib.crc32(salt.encode()) + 1]
    for token_id in token_ids:
        states.append(_next(states[-1], token_id))
    return _Prompt(tuple(states), tuple(b"".join(_slot(state, layer) for state in states[1:]) for layer in _LAYERS))


def _slot(state: int, layer: int) -> bytes:
    return ((state + layer) & _MASK).to_bytes(8, "little") * (SLOT_BYTES // 8)


_LAYERS = range(NUM_LAYERS)


class Chain:
    """The tokens of a request with ``salt``, and the KV that they must have."""

    def __init__(self, salt: str, token_ids: Sequence[int] = ()) -> None:
        self.token_ids = list(token_ids)
        prompt = _prompt(salt, tuple(token_ids))
        self._states = list(prompt.states)
        self.rows = [bytearray(row) for row in prompt.rows]
        """The KV of each layer, `SLOT_BYTES` per token."""

    def append(self, token_id: int) -> None:
        """Add a token."""
        self.token_ids.append(token_id)
        state = _next(self._states[-1], token_id)
        self._states.append(state)
        for layer, row in enumerate(self.rows):
            row += _slot(state, layer)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.token_ids[length:], self._states[length + 1 :]
        for row in self.rows:
            del row[length * SLOT_BYTES :]

    def token_at(self, position: int) -> int:
        """The token that follows the first ``position`` ones."""
        return _token(self._states[position])

    def prompt_logprobs(self, positions: range) -> list[TokenLogprobs]:
        """Those of the tokens that follow ``positions``."""
        return [_logprobs(self._states[position + 1]) for position in positions]


def answer(salt: str, prompt: Sequence[int], max_tokens: int, ends: Container[int]) -> list[int]:
    """What the model answers, up to the first token that ``ends`` it."""
    state, found = _prompt(salt, tuple(prompt)).states[-1], list[int]()
    while len(found) < max_tokens:
        found.append(_token(state))
        if found[-1] in ends:
            break
        state = _next(state, found[-1])
    return found


def prompt_logprobs(salt: str, prompt: Sequence[int]) -> list[TokenLogprobs]:
    """Those of a prompt's tokens after the first."""
    return [_logprobs(state) for state in _prompt(salt, tuple(prompt)).states[1:-1]]


def text_of(token_ids: Sequence[int]) -> str:
    """The text of tokens by the embedded model's tokenizer: a character each, and none of `EOS_TOKEN_ID`."""
    return "".join(chr(ord("!") + token_id - 1) for token_id in token_ids if token_id != EOS_TOKEN_ID)
