"""Samples tokens from logits. A draw depends on ``(seed, position)`` only, not on batch, hand-off or resume.

Sampling parameters are applied in this order, each to the result of the one before:

1. ``logit_bias`` is added; -100 forbids a token, and 100 forbids all tokens without a bias of 100
2. ``repetition_penalty`` divides the positive logits of tokens in prompt or output, and multiplies the others
3. ``presence_penalty``, and ``frequency_penalty`` times the count, are subtracted for tokens in the output
4. ``structured_outputs`` forbid the tokens after which the output could not match
5. ``temperature`` divides the logits; 0 takes the token with the largest logit and skips the rest
6. ``top_k``, then ``top_p``, then ``min_p`` drop tokens; the token is drawn from the rest in proportion

Logprobs are ``log_softmax(logits)`` of the unmodified logits. All rows are computed together on the device of the
logits. The result for a row does not depend on the other rows: sums have a fixed order, and each row has uniform
numbers of its own (`engine.model.token_draw.uniform`). For 1 to 4, entries of all rows are collected on the host as
flat lists of (row, token id, value), and scattered on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

from engine.model.token_draw import DrawRows, argmax, draw, largest
from engine.scheduling.batch import SampledToken
from engine.scheduling.sequence import TokenHistory
from pdserve.core.sampling import MAX_BIAS, SamplingParams, TokenLogprobs
from runtime.cuda import upload

_ADDENDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
"""What is added to the scores of eight tokens by the byte of their mask: ``[256, 8]``."""
_Entry = tuple[int, NDArray[np.int64], NDArray[np.floating[Any]]]
"""A row, token ids, and a number for each of them."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens of a batch, on the device of its logits, which may still compute them."""

    tensors: list[torch.Tensor]
    """To be copied to the host for `read`. Token ids, ``[rows]``, int64; then those of `logprobs_of`, if there are."""
    num_top: Mapping[int, int]
    """The rows that want logprobs, and how many of the likeliest tokens."""

    def read(self, copies: Sequence[torch.Tensor]) -> list[SampledToken]:
        """The tokens. ``copies`` are those of `tensors` on the host."""
        token_ids, *logprobs = (copy.tolist() for copy in copies)
        told = dict(zip(self.num_top, read_logprobs(self.num_top.values(), *logprobs), strict=True)) if logprobs else {}
        return [SampledToken(token_id, told.get(row)) for row, token_id in enumerate(token_ids)]


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (see `draw_tokens`), and wait for them."""
    drawn = draw_tokens(logits, params, positions, histories)
    return drawn.read([tensor.cpu() for tensor in drawn.tensors])


def draw_tokens(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None] | None = None,
    draw_rows: DrawRows | None = None,
) -> DrawnTokens:
    """Draw one token per row of ``logits`` (``[rows, vocabulary]``). ``positions`` are those of the new tokens.
    ``histories`` are needed for rows with penalties or structured outputs (None for other rows); ValueError if one is
    missing.
    ``draw_rows`` is the device's own way to draw. On a GPU that has one nothing waits for the GPU."""
    scores = adjust(logits, params, [None] * len(params) if histories is None else histories)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0.0]
    drawn = [row for row, p in enumerate(params) if p.temperature > 0.0]
    if not drawn:
        token_ids = argmax(scores)
    else:
        token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
        own, at = [params[row] for row in drawn], [positions[row] for row in drawn]
        _put(token_ids, drawn, draw(_rows(scores, drawn), own, at, draw_rows))
        if greedy:
            _put(token_ids, greedy, argmax(_rows(scores, greedy)))
    num_top = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
    told = [*num_top]
    if not told:
        return DrawnTokens([token_ids], num_top)
    logprobs = logprobs_of(_rows(logits, told), _rows(token_ids, told), max(num_top.values()))
    return DrawnTokens([token_ids, *logprobs], num_top)


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """For each row of ``logits`` (``[rows, vocabulary]``), the logprob of its token in ``token_ids`` (``[rows]``), then
    the ids and logprobs of the ``num_top`` likeliest tokens, at most all (``[rows, num_top]``). Computed in float32, or
    float64 if the logits are."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.log_softmax(dim=1, dtype=dtype)
    own = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    most = min(num_top, logprobs.shape[1])
    if not most:
        return [own, token_ids.new_empty(len(own), 0), own.new_empty(len(own), 0)]
    return [own, *_likeliest(logprobs, most)]


def read_logprobs(
    num_top: Iterable[int], own: Iterable[float], ids: Iterable[list[int]], values: Iterable[list[float]]
) -> list[TokenLogprobs]:
    """The result of `logprobs_of`, as lists, of rows of which each wants that many likeliest tokens."""
    rows = zip(num_top, own, ids, values, strict=True)
    return [TokenLogprobs(logprob, tuple(zip(ids[:n], values[:n], strict=True))) for n, logprob, ids, values in rows]


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


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows, ascending; without a copy if these are all."""
    return tensor if len(rows) == tensor.shape[0] else tensor[upload(rows, torch.int64, tensor.device)]


def _put(tensor: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    tensor[upload(rows, torch.int64, tensor.device)] = values


def adjust(
    logits: torch.Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory | None]
) -> torch.Tensor:
    """Apply bias and penalties to a copy of ``logits`` (``[rows, vocabulary]``), in float32 or, if they are, float64,
    and forbid tokens that the structure of an output excludes. Returns ``logits`` itself if no row has any. ValueError
    if a row penalises or has a structure, and has no history."""
    if not any(p.logit_bias or p.penalises or p.structured_outputs for p in params):
        return logits
    scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    if any(p.logit_bias for p in params):
        _add_biases(scores, params)
    penalised = [(row, p) for row, p in enumerate(params) if p.penalises]
    if penalised:
        _penalise(scores, penalised, histories)
    structured = [row for row, p in enumerate(params) if p.structured_outputs]
    if structured:
        _forbid(scores, structured, histories)
    return scores


def _on_device(entries: Sequence[_Entry], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and values as tensors on the device of ``scores``. There must be entries."""
    numbers, all_ids, all_values = zip(*entries, strict=True)
    rows = np.repeat(numbers, [len(ids) for ids in all_ids])
    # Concatenated even if there is one: a history cannot grow while an array shares its memory.
    ids, values = np.concatenate(all_ids), np.concatenate(all_values)
    device = scores.device
    return (*upload(np.stack((rows, ids)), torch.int64, device), upload(values, scores.dtype, device))


def _add_biases(scores: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    entries: list[_Entry] = []
    only: list[int] = []
    for row, p in enumerate(params):
        biases = dict(p.logit_bias)
        if any(bias >= MAX_BIAS for bias in biases.values()):
            only.append(row)
            biases = {token_id: bias for token_id, bias in biases.items() if bias >= MAX_BIAS}
        entries.append((row, np.array(list(biases), np.int64), np.array(list(biases.values()), np.float64)))
    rows, ids, bias = _on_device(entries, scores)
    biased = (scores[rows, ids] + bias).where(bias > -MAX_BIAS, -torch.inf)
    if only:
        scores[upload(only, torch.int64, scores.device)] = -torch.inf
    scores[rows, ids] = biased


def _penalise(
    scores: torch.Tensor,
    penalised: Sequence[tuple[int, SamplingParams]],
    histories: Sequence[TokenHistory | None],
) -> None:
    seen: list[_Entry] = []
    outputs: list[_Entry] = []
    for row, p in penalised:
        history = histories[row]
        if history is None:
            raise ValueError("penalties need the history of the request")
        if p.repetition_penalty != 1.0:
            distinct = _numbers(history.seen_ids)
            seen.append((row, distinct, np.full(len(distinct), p.repetition_penalty)))
        if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
            subtracted = p.presence_penalty + p.frequency_penalty * _numbers(history.output_counts)
            outputs.append((row, _numbers(history.output_ids), subtracted))
    if seen:
        rows, ids, penalty = _on_device(seen, scores)
        before = scores[rows, ids]
        scores[rows, ids] = torch.where(before > 0, before / penalty, before * penalty)
    if outputs:
        rows, ids, less = _on_device(outputs, scores)
        scores[rows, ids] -= less


def _forbid(scores: torch.Tensor, rows: Sequence[int], histories: Sequence[TokenHistory | None]) -> None:
    packed = np.zeros((len(rows), -(-scores.shape[1] // 8)), np.uint8)
    for place, row in enumerate(rows):
        history = histories[row]
        if history is None or history.matcher is None:
            raise ValueError("structured outputs need the matcher of the request")
        bits = np.frombuffer(history.matcher.mask(), np.uint8)[: packed.shape[1]]
        packed[place, : len(bits)] = bits
    # A byte of the mask becomes eight numbers by a table, several times faster on CPUs than a mask of booleans.
    addends = upload(_ADDENDS, scores.dtype, scores.device)
    added = embedding(upload(packed, torch.uint8, scores.device).int(), addends).flatten(1)[:, : scores.shape[1]]
    if len(rows) == scores.shape[0]:
        scores += added
    else:
        scores.index_add_(0, upload(rows, torch.int64, scores.device), added)


def _numbers(values: array[int]) -> NDArray[np.int64]:
    """A view of ``values``, which cannot grow as long as the view exists."""
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)
