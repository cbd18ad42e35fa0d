"""Log-probabilities of sampled tokens and of the likeliest ones, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.token_blocks import largest
from pdserve.core.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Logprobs on the device of the logits. ``own`` (``[rows]``) are those of the sampled tokens, ``values`` and
    ``token_ids`` (``[rows, most]``) those of the likeliest tokens, of which row i wants ``num_top[i]``."""

    own: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor
    num_top: Sequence[int]

    def tensors(self) -> list[torch.Tensor]:
        """All results, to be copied to the host for `read`."""
        return [self.own, self.token_ids, self.values]

    def read(self, copies: Sequence[torch.Tensor]) -> list[TokenLogprobs]:
        """The logprobs of each row. ``copies`` are those of `tensors` on the host."""
        own, token_ids, values = (copy.tolist() for copy in copies)
        return [
            TokenLogprobs(each, tuple(zip(ids[:n], likeliest[:n], strict=True)))
            for each, ids, likeliest, n in zip(own, token_ids, values, self.num_top, strict=True)
        ]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`logprob_tensors`, waited for."""
    found = logprob_tensors(logits, token_ids, num_top)
    return found.read([tensor.cpu() for tensor in found.tensors()])


def logprob_tensors(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> LogprobTensors:
    """For each row of ``logits`` (``[rows, vocabulary]``), the logprobs of the token in ``token_ids`` (``[rows]``) and
    of the ``num_top`` likeliest ones, at most all. Computed in float32, or float64 if the logits are."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.log_softmax(dim=1, dtype=dtype)
    own = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    most = min(max(num_top), logprobs.shape[1])
    if most:
        ids, values = _likeliest(logprobs, most)
    else:
        ids, values = token_ids.new_empty(len(num_top), 0), own.new_empty(len(num_top), 0)
    return LogprobTensors(own, ids, values, num_top)


def _likeliest(logprobs: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logprobs of the ``most`` likeliest tokens of each row, likeliest first, of equals the lower id first."""
    if logprobs.device.type != "cpu":
        return likeliest_by_key(logprobs, most)
    vocabulary = logprobs.shape[1]
    values, ids = largest(logprobs, min(most + 1, vocabulary))
    if most < vocabulary and bool((values[:, most] == values[:, most - 1]).any()):
        # All that tie with the last one compete, so that `largest` does not decide which of them are told.
        competing = int((logprobs >= values[:, most - 1 : most]).sum(dim=1).max())
        values, ids = largest(logprobs, competing)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order)[:, :most], values[:, :most]


def likeliest_by_key(logprobs: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without a look at the values on the host, for float32 only: a key orders them by value, then by id."""
    token_ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    # Logprobs are at most 0, so their order is the reverse of their magnitudes', which are ordered as integers.
    magnitudes = (logprobs.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    keys, _ = torch.topk((-magnitudes << 32) - token_ids, most, dim=1)
    ids = -keys & 0xFFFFFFFF
    return ids, logprobs.gather(1, ids)
