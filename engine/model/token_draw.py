"""Draws one token per row, for all rows of a batch at once.

A token is drawn from the weights that temperature, top-k and min-p leave, by the inverse of their distribution. Top-p
is then a test of the token: it belongs to the smallest set with a share p exactly if the weights greater than its own
sum to less than p. If it does not, neither does any token with its weight or less, so all of these are dropped and the
next number draws from the rest. So tokens are drawn from the exact distribution, and no row is sorted. The likeliest
token always passes.

Rows over the vocabulary are cut into blocks, so that a row is searched in two short steps instead of one long one. A
reduction over the last dimension of ``[rows, blocks, BLOCK_TOKENS]`` is several times faster on CPUs than one that also
tells an index, and its result for a row does not depend on how many other rows there are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
import xxhash

from pdserve.core.sampling import SamplingParams
from runtime.cuda import upload

BLOCK_TOKENS = 512
_TILE_BYTES = 4 * 2**20  # on a CPU: the weights of so many rows stay in its cache from one operation to the next
_LEAST_TEMPERATURE = 1e-30  # anything so small is greedy; a float32 must not round it to zero

INCREMENT = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64, which kernels compute by themselves (`engine.kernels.cuda_top_p`)."""
_MASK = 2**64 - 1

Key = tuple[int, int]
"""Seed and position, which select the uniform numbers of a row."""

DrawRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[Key], Sequence[float]], torch.Tensor]
"""Draws a token for each row until it passes the test of top-p: the greater weights sum to less than ``wanted``.
Arguments: ``weights`` (``[rows, padded vocabulary]``), their ``sums`` over blocks (``[rows, blocks]``), ``wanted``
(``[rows]``, float64), and of each row its key and its top-p. Returns ids, ``[rows]``, int64."""


def draw(
    scores: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    draw_rows: DrawRows | None = None,
) -> torch.Tensor:
    """Draw a token for each row of ``scores`` (``[rows, vocabulary]``), at these positions. All temperatures are above
    0. Returns ids, ``[rows]``, int64. ``draw_rows`` is the device's own way to draw (default: operations of PyTorch,
    which wait for a GPU at each turn).

    Weights are float32, or float64 if the scores are; sums over blocks are added up in float64."""
    chosen, keys = draw_rows or draw_in_turns, [(p.seed or 0, at) for p, at in zip(params, positions, strict=True)]
    if scores.device.type != "cpu":
        return _draw(scores, params, keys, chosen)
    tile = max(1, _TILE_BYTES // (padded(scores.shape[1]) * scores.element_size()))
    parts = [slice(start, start + tile) for start in range(0, len(keys), tile)]
    return torch.cat([_draw(scores[part], params[part], keys[part], chosen) for part in parts])


def _draw(
    scores: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[Key], draw_rows: DrawRows
) -> torch.Tensor:
    top_ps = [p.top_p for p in params]
    weights = _weights(scores, [p.temperature for p in params])
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < scores.shape[1]]
    if limited:
        _drop_below(weights, _least_of_top_k(weights, params, limited))
    sums = blocks(weights).sum(dim=2)
    wanted = sums.double().sum(dim=1) * _column(top_ps, scores.device, torch.float64)[:, 0]
    if any(p.min_p > 0.0 for p in params):
        _drop_below(weights, _column([p.min_p for p in params], scores.device, weights.dtype))
        sums = blocks(weights).sum(dim=2)
    ids = draw_rows(weights, sums, wanted, keys, top_ps)
    sound = wanted.isfinite()
    if scores.device.type == "cpu" and bool(sound.all()):  # elsewhere the question would wait
        return ids
    return ids.where(sound, argmax(scores))  # the model overflowed; any token will do


def _weights(scores: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """``exp((score - largest) / temperature)``, padded with 0: ``[rows, padded vocabulary]``. The largest weight is
    1."""
    num_rows, vocabulary = scores.shape
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    temperature = _column([max(t, _LEAST_TEMPERATURE) for t in temperatures], scores.device, dtype)
    weights = torch.empty(num_rows, padded(vocabulary), dtype=dtype, device=scores.device)
    weights[:, vocabulary:] = -torch.inf
    inside = weights[:, :vocabulary]
    # The difference of near scores is exact, so a low temperature magnifies no rounding.
    torch.sub(scores, scores.amax(dim=1, keepdim=True).to(dtype), out=inside)
    inside.div_(temperature)
    return weights.exp_()


def _least_of_top_k(weights: torch.Tensor, params: Sequence[SamplingParams], limited: Sequence[int]) -> torch.Tensor:
    """The smallest weight that top-k keeps in each row (0 in rows other than ``limited``): ``[rows, 1]``. Tokens that
    tie with it stay, so that no result depends on the order of a sort."""
    device = weights.device
    least = torch.zeros(len(params), 1, dtype=weights.dtype, device=device)
    some = upload(limited, torch.int64, device)
    ks = [params[i].top_k for i in limited]
    top, _ = largest(weights if len(limited) == len(params) else weights[some], max(ks))
    least[some] = top.gather(1, upload(ks, torch.int64, device)[:, None] - 1)
    return least


def _drop_below(weights: torch.Tensor, least: torch.Tensor) -> None:
    """Set weights below ``least`` (``[rows, 1]``) to 0."""
    weights.mul_(torch.ge(weights, least, out=torch.empty_like(weights)))


def draw_in_turns(
    weights: torch.Tensor, sums: torch.Tensor, wanted: torch.Tensor, keys: Sequence[Key], top_ps: Sequence[float]
) -> torch.Tensor:
    """See `DrawRows`. Each turn draws for the rows that are left."""
    device = weights.device
    ids = torch.empty(len(keys), dtype=torch.int64, device=device)
    left = list(range(len(keys)))
    turn = 0
    while left:
        numbers = torch.tensor([uniform(*keys[i], turn) for i in left], dtype=torch.float64, device=device)
        drawn = search(weights, sums, numbers)
        ids[torch.tensor(left, device=device)] = drawn
        if all(top_ps[i] >= 1.0 for i in left):
            break
        greater = torch.gt(weights, weights.gather(1, drawn[:, None]), out=torch.empty_like(weights)).mul_(weights)
        sums = blocks(greater).sum(dim=2)
        left_over = sums.double().sum(dim=1)
        again = ((left_over >= wanted) & (left_over > 0)).tolist()  # False where weights are not numbers
        places = [place for place, i in enumerate(left) if again[place] and top_ps[i] < 1.0]
        chosen = torch.tensor(places, dtype=torch.int64, device=device)
        weights, sums, wanted = greater[chosen], sums[chosen], wanted[chosen]
        left = [left[place] for place in places]
        turn += 1
    return ids


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return upload(values, dtype, device)[:, None]


# --- uniform numbers, of which each is a function of its key alone, so that rows share no generator ----------------


def first_bits(seed: int, position: int) -> int:
    """The 64 bits of turn 0 at ``position`` of a request with ``seed``, both in 0 to 2**64-1."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position))


def uniform(seed: int, position: int, turn: int = 0) -> float:
    """The number in [0, 1), a multiple of 2**-53, of turn ``turn`` at ``position`` of a request with ``seed``. ``seed``
    and ``position`` are in 0 to 2**64-1. The first number of a position is a hash of both; those of further turns are
    its successors in SplitMix64."""
    bits = first_bits(seed, position)
    if turn:
        bits = (bits + turn * INCREMENT) & _MASK
        bits = ((bits ^ (bits >> 30)) * MULTIPLIERS[0]) & _MASK
        bits = ((bits ^ (bits >> 27)) * MULTIPLIERS[1]) & _MASK
        bits ^= bits >> 31
    return float(bits >> 11) * 2.0**-53


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
