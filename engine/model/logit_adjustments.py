"""Bias, penalties, and structures of the output, applied to the logits of all rows of a batch at once.

Entries of all rows are collected on the host as flat lists of (row, token id, value), and scattered on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

from engine.model.upload import upload
from engine.scheduling.sequence import TokenHistory
from pdserve.core.sampling import MAX_BIAS, SamplingParams

_ADDENDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
"""What is added to the scores of eight tokens by the byte of their mask: ``[256, 8]``."""


_Entry = tuple[int, NDArray[np.int64], NDArray[np.floating[Any]]]
"""A row, token ids, and a number for each of them."""


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
