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
    model expects at the beginning of a prompt. An empty ``request_id`` gets a new one; without ``sampling.seed`` one is
    drawn. ``shorten``: ``sampling.max_tokens`` is a default, and is reduced to what fits."""

    prompt: str | Sequence[int] | None
    sampling: SamplingParams
    request_id: str = ""
    mode: Mode = Mode.AUTO
    salt: str = ""
    shorten: bool = False
    special_tokens: bool = True
