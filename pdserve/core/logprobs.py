"""Log-probabilities of tokens."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities under the model's own distribution, ``log_softmax(logits)``, before bias,
    penalties, temperature, and filters. They do not depend on how the token was sampled.

    ``logprob`` is that of the sampled token. ``top`` are the likeliest ``(token id, logprob)``, likeliest first (ties:
    lower id first); the sampled token is included only if it is among them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
