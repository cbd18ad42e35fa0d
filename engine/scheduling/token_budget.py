"""How many tokens each request gets in one step."""

from __future__ import annotations

from typing import Literal

ChunkTokens = int | Literal["off"] | None
"""How much of one prompt a step may compute: None as much as the budget has left, a number at most so many tokens,
``off`` all of it or nothing."""


class TokenBudget:
    """The tokens of one step, given out one request after the other.

    ``num_decodes`` requests need a single token each; what they need is kept back from prompts.
    """

    def __init__(self, num_tokens: int, num_decodes: int, chunk_tokens: ChunkTokens) -> None:
        self._left = num_tokens
        self._spare = num_tokens - num_decodes
        self._chunk_tokens = chunk_tokens

    def offer(self, wanted: int, *, first: bool, is_prompt: bool = True) -> int:
        """How many of ``wanted`` tokens (at least 1) a running request gets. The ``first`` in a step gets one in any
        case, unless they are of a prompt and prompts are not to be cut."""
        if wanted == 1:
            return min(1, self._left)
        if self._chunk_tokens == "off" and not is_prompt:
            return min(wanted, max(self._spare, int(first)), self._left)
        room = max(self._spare, 1 if first and self._chunk_tokens != "off" else 0)
        return self._cut(wanted, min(room, self._left))

    def offer_new(self, wanted: int) -> int:
        """The same for a request that is admitted in this step, after all running ones."""
        return self._cut(wanted, self._left)

    def spend(self, num_tokens: int, wanted: int) -> None:
        """So many tokens are taken, of ``wanted`` ones. A decode's one was kept back for it."""
        self._left -= num_tokens
        if wanted > 1:
            self._spare -= num_tokens

    def _cut(self, wanted: int, room: int) -> int:
        if self._chunk_tokens == "off":
            return wanted if wanted <= room else 0
        limit = wanted if self._chunk_tokens is None else min(wanted, self._chunk_tokens)
        return max(0, min(limit, room))
