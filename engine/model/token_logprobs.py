"""Log-probabilities of sampled tokens and of the likeliest ones, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.token_blocks import largest
from pdserve.core.logprobs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of ``logits`` (``[rows, vocabulary]``), the logprobs of the token in ``token_ids`` (``[rows]``) and
    of the ``num_top`` likeliest ones, at most all. Computed in float32, or float64 if the logits are."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.log_softmax(dim=1, dtype=dtype)
    own = logprobs.gather(1, token_ids[:, None]).squeeze(1).tolist()
    most = min(max(num_top), logprobs.shape[1])
    if not most:
        return [TokenLogprobs(value) for value in own]
    ids, values = _likeliest(logprobs, most)
    tops = [
        tuple(zip(i[:n], v[:n], strict=True)) for i, v, n in zip(ids.tolist(), values.tolist(), num_top, strict=True)
    ]
    return [TokenLogprobs(value, top) for value, top in zip(own, tops, strict=True)]


def _likeliest(logprobs: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logprobs of the ``most`` likeliest tokens of each row, likeliest first, of equals the lower id first."""
    vocabulary = logprobs.shape[1]
    values, ids = largest(logprobs, min(most + 1, vocabulary))
    if most < vocabulary and bool((values[:, most] == values[:, most - 1]).any()):
        # All that tie with the last one compete, so that `largest` does not decide which of them are told.
        competing = int((logprobs >= values[:, most - 1 : most]).sum(dim=1).max())
        values, ids = largest(logprobs, competing)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order)[:, :most], values[:, :most]
