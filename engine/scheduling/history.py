"""Which tokens a request has in its prompt and output: what penalties are taken by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenHistory:
    """Grows token by token, so that no step reads the whole prompt again. All arrays have the type code ``q``.

    ``seen_ids`` are the distinct ids of prompt and outputs; ``output_ids`` those of the outputs alone, and
    ``output_counts`` how often each of them came. In order of their first appearance.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """``token_ids`` are known already; those after the first ``num_prompt_tokens`` are outputs."""
        self.seen_ids = array("q", dict.fromkeys(token_ids[:num_prompt_tokens]))
        self.output_ids = array("q")
        self.output_counts = array("q")
        self._seen = set(self.seen_ids)
        self._places: dict[int, int] = {}
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take an output token in."""
        if token_id not in self._seen:
            self._seen.add(token_id)
            self.seen_ids.append(token_id)
        place = self._places.setdefault(token_id, len(self.output_ids))
        if place == len(self.output_ids):
            self.output_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += 1
