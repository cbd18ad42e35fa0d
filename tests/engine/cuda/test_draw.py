"""The draw of tokens in one launch: the tokens of PyTorch's turns, by the same numbers."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels.cuda_top_p import draw_rows
from engine.model.sampler import draw_tokens
from engine.model.token_draw import Key, blocks, draw_in_turns, padded
from pdserve.core.sampling import SamplingParams

VOCABULARY = 9000  # three pieces for a program, the last one short


def rows_of(count: int) -> tuple[list[Key], list[float]]:
    """Keys and top-p of rows."""
    choices = random.Random(3)
    return [(2**64 - 1 - i, 7 * i) for i in range(count)], choices.choices([1.0, 0.9, 0.5, 0.05, 1e-4], k=count)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 20.0])
def test_the_tokens_of_pytorchs_turns(spread: float, device: torch.device) -> None:
    keys, top_ps = rows_of(12)
    torch.manual_seed(1)
    weights = torch.zeros(len(keys), padded(VOCABULARY))
    scores = torch.randn(len(keys), VOCABULARY) * spread
    weights[:, :VOCABULARY] = (scores - scores.amax(dim=1, keepdim=True)).exp()
    weights[:, 100:200] = 0.0  # dropped by top-k or min-p
    sums = blocks(weights).sum(dim=2)
    shares = torch.tensor(top_ps, dtype=torch.float64)
    wanted = sums.double().sum(dim=1) * shares
    expected = draw_in_turns(weights.clone(), sums, wanted, keys, top_ps)
    drawn = draw_rows(weights.to(device), sums.to(device), wanted.to(device), keys, top_ps)
    assert drawn.tolist() == expected.tolist()
    assert not (weights[torch.arange(len(keys)), expected] == 0).any()


def test_turns_do_reject(device: torch.device) -> None:
    """Else the test above would show one turn only."""
    keys = [(seed, 0) for seed in range(6)]
    weights = torch.full((len(keys), padded(VOCABULARY)), 0.5)
    weights[:, 8000] = 1.0
    sums = blocks(weights).sum(dim=2)
    wanted = torch.full((len(keys),), 0.9, dtype=torch.float64)
    drawn = draw_rows(weights.to(device), sums.to(device), wanted.to(device), keys, [0.01] * len(keys))
    assert drawn.tolist() == [8000] * len(keys)


def test_rows_that_are_no_numbers_end(device: torch.device) -> None:
    params = [SamplingParams(temperature=0.8, top_p=top_p, seed=seed) for seed, top_p in enumerate((1.0, 0.5, 1e-4))]
    logits = torch.randn(3, 700)
    logits[1] = float("nan")
    logits[2, 5] = float("inf")
    drawn = draw_tokens(logits.to(device), params, [0, 1, 2], None, draw_rows)
    assert all(0 <= token_id < 700 for token_id in drawn.tensors[0].tolist())
