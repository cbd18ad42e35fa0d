"""A request as a client submitted it, whichever API it came by, before it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.request import Mode
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a client asks for. `gateway.validation` checks it.

    ``prompt`` is text, token ids, or None if it is missing. ``special_tokens``: a text gets the special tokens that the
    model expects at the beginning of a prompt. An empty ``request_id`` gets a new one; without ``sampling.seed`` it is
    made from the id. ``shorten``: ``sampling.max_tokens`` is a default, and is reduced to what fits. Lower values of
    ``priority`` are served earlier. ``user`` is whom the client names as the one it asks for. ``resume``: the tokens
    that the client already has; the output goes on after them."""

    prompt: str | Sequence[int] | None
    sampling: SamplingParams
    request_id: str = ""
    mode: Mode = Mode.AUTO
    salt: str = ""
    session_id: str = ""
    shorten: bool = False
    special_tokens: bool = True
    priority: int = 0
    user: str = ""
    resume: Sequence[int] = ()

    def asks_the_same(self, other: Submission) -> bool:
        """Whether both ask for the same output, wherever they resume it."""
        return (
            self.sampling == other.sampling
            and (self.mode, self.salt, self.shorten) == (other.mode, other.salt, other.shorten)
            and self.special_tokens == other.special_tokens
            and self.prompt == other.prompt
        )
