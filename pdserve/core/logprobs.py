"""How likely a token was."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities under the model's own distribution, ``log_softmax(logits)``: before bias,
    penalties, temperature and filters, so that they say the same of a token however it was drawn.

    ``logprob`` is the sampled token's. ``top`` are the likeliest ``(token id, logprob)``, likeliest first (of equals
    the lower id first); the sampled token is among them only if it is that likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
