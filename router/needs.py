"""What a request needs from its workers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from pdserve.core.request import Mode

WaitMode = Literal[Mode.PD, Mode.COLOCATED, Mode.AUTO]
"""Mode of a request. ``auto`` is what is cheaper (`router.auto_mode`)."""


NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


class Needs(msgspec.Struct, frozen=True):
    """What a request needs from its workers.

    ``prompt_tokens``: tokens to compute first.
    ``output_tokens``: the most tokens to sample after them.
    ``sure_tokens``: the fewest tokens to sample.
    ``avoid``: workers that failed the request.
    ``prefer``: prefill worker of the last attempt, whose prefix cache holds the prompt (empty: none).
    ``ticket``: a number of its own, from which random policies draw.
    ``session``: the session that it belongs to (empty: none).
    ``cached``: how many of its first tokens workers have in their prefix caches, as far as known; others have none.
    """

    mode: WaitMode
    prompt_tokens: int
    output_tokens: int
    avoid: frozenset[str] = frozenset()
    prefer: str = ""
    ticket: int = 0
    session: str = ""
    cached: Mapping[str, int] = NOTHING_CACHED
    sure_tokens: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of prompt and outputs."""
        return self.prompt_tokens + self.output_tokens

    def uncached(self, worker_id: str) -> int:
        """Tokens of the prompt that this worker has to compute, at least the last one."""
        return max(1, self.prompt_tokens - self.cached.get(worker_id, 0))
