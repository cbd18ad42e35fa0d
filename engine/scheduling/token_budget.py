"""How many tokens each request gets in one step."""

from __future__ import annotations


class TokenBudget:
    """The tokens of one step, given out one request after the other.

    ``num_decodes`` requests need a single token each; what they need is kept back from prompts. ``chunk_tokens`` bounds
    what one prompt gets (None: nothing but the budget does).
    """

    def __init__(self, num_tokens: int, num_decodes: int, chunk_tokens: int | None) -> None:
        self._left = num_tokens
        self._spare = num_tokens - num_decodes
        self._chunk_tokens = num_tokens if chunk_tokens is None else chunk_tokens

    def offer(self, wanted: int, *, first: bool) -> int:
        """How many of ``wanted`` tokens (at least 1) a running request gets; the ``first`` in a step gets one in any
        case."""
        if wanted == 1:
            return min(1, self._left)
        return max(0, min(wanted, self._chunk_tokens, max(self._spare, int(first)), self._left))

    def offer_new(self, wanted: int) -> int:
        """The same for a request that is admitted in this step, after all running ones."""
        return min(wanted, self._chunk_tokens, self._left)

    def take_drafts(self, wanted: int) -> int:
        """Take as many of ``wanted`` draft tokens as all other tokens have left, and tell how many."""
        num_tokens = min(wanted, self._left)
        self._left -= num_tokens
        return num_tokens

    def spend(self, num_tokens: int, wanted: int) -> None:
        """So many tokens are taken, of ``wanted`` ones. A decode's one was kept back for it."""
        self._left -= num_tokens
        if wanted > 1:
            self._spare -= num_tokens
