"""Rows over the vocabulary cut into blocks, so that a row is searched in two short steps instead of one long one.

A reduction over the last dimension of ``[rows, blocks, BLOCK_TOKENS]`` is several times faster on CPUs than one that
also tells an index, and its result for a row does not depend on how many other rows there are.
"""

from __future__ import annotations

import torch

BLOCK_TOKENS = 512


def padded(num_tokens: int) -> int:
    """``num_tokens`` rounded up to whole blocks."""
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def blocks(rows: torch.Tensor) -> torch.Tensor:
    """View ``rows`` (``[rows, width]``, width a multiple of `BLOCK_TOKENS`) as ``[rows, blocks, BLOCK_TOKENS]``."""
    return rows.view(rows.shape[0], -1, BLOCK_TOKENS)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """The index of the largest score of each row, the lowest one of equals (``[rows]``, int64). ``scores`` is
    ``[rows, vocabulary]``."""
    if scores.shape[1] < 2 * BLOCK_TOKENS:
        return scores.max(dim=1).indices
    values, ids = _tokens(scores, _largest_of_blocks(scores).max(dim=1, keepdim=True).indices)
    return ids.gather(1, values.max(dim=1, keepdim=True).indices).squeeze(1)


def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest scores of each row, descending, and their indices (``[rows, k]`` each). Which of several equal
    scores are among them is not defined. ``scores`` is ``[rows, vocabulary]``."""
    if 4 * k * BLOCK_TOKENS > scores.shape[1]:
        top = scores.topk(k, dim=1)
        return top.values, top.indices
    # They lie in the k blocks with the largest maxima.
    values, ids = _tokens(scores, _largest_of_blocks(scores).topk(k, dim=1).indices)
    top = values.topk(k, dim=1)
    return top.values, ids.gather(1, top.indices)


def search(weights: torch.Tensor, block_sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Invert the distribution of each row in vocabulary order at ``numbers`` (``[rows]``, float64, in [0, 1)).

    ``weights`` is ``[rows, width]`` (at least 0, not all 0), ``block_sums`` ``[rows, blocks]`` their sums. Returns
    indices ``[rows]``; a weight of 0 is never hit. Sums over a block are float64."""
    reached = block_sums.double().cumsum(dim=1)
    block = _first_beyond(reached, numbers[:, None] * reached[:, -1:])
    target = numbers * reached[:, -1] - (reached.gather(1, block) - block_sums.gather(1, block)).squeeze(1)
    inside = blocks(weights).gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS)).squeeze(1)
    place = _first_beyond(inside.double().cumsum(dim=1), target[:, None])
    return (block * BLOCK_TOKENS + place).squeeze(1)


def _largest_of_blocks(scores: torch.Tensor) -> torch.Tensor:
    """The maximum of each block: ``[rows, blocks]``. The last block may be shorter."""
    whole = scores.shape[1] - scores.shape[1] % BLOCK_TOKENS
    maxima = blocks(scores[:, :whole]).amax(dim=2)
    if whole == scores.shape[1]:
        return maxima
    return torch.cat((maxima, scores[:, whole:].amax(dim=1, keepdim=True)), dim=1)


def _tokens(scores: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores in the blocks ``block`` (``[rows, k]``) and their indices, ``[rows, k * BLOCK_TOKENS]`` each. Where
    the last block is shorter, -inf and the last index stand for what it lacks."""
    inside = torch.arange(BLOCK_TOKENS, device=scores.device)
    ids = (block[:, :, None] * BLOCK_TOKENS + inside).flatten(1)
    if not scores.shape[1] % BLOCK_TOKENS:
        return scores.gather(1, ids), ids
    there = ids < scores.shape[1]
    ids = ids.clamp_(max=scores.shape[1] - 1)
    return scores.gather(1, ids).where(there, -torch.inf), ids


def _first_beyond(reached: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index per row at which ``reached`` exceeds ``target`` (``[rows, 1]``), which rounding may have put
    slightly outside."""
    total = reached[:, -1:]
    target = torch.minimum(target.clamp(min=0.0), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(reached, target, right=True).clamp_(max=reached.shape[1] - 1)
