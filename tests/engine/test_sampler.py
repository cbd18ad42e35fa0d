"""The sampler: greedy, the filters, and that a draw hangs on seed and position alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.sampler import sample as sample_tokens
from engine.model.token_draw import uniform
from pdserve.core.sampling import SamplingParams

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0, -9.0]])


def _params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: Sequence[int]) -> list[int]:
    return [token.token_id for token in sample_tokens(logits, params, positions)]


def _support(params: SamplingParams, draws: int = 3000) -> Counter[int]:
    rows = LOGITS.expand(draws, -1)
    return Counter(sample(rows, [params] * draws, range(draws)))


def test_temperature_zero_takes_the_largest() -> None:
    assert sample(LOGITS, [_params(temperature=0.0)], [3]) == [0]


def test_frequencies_follow_the_distribution() -> None:
    counts = _support(_params(temperature=0.7))
    wanted = torch.softmax(LOGITS[0] / 0.7, dim=-1)
    for token, probability in enumerate(wanted.tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_k_tokens_and_ties_with_the_last() -> None:
    assert set(_support(_params(top_k=1))) == {0}
    assert set(_support(_params(top_k=2))) == {0, 1, 4}  # 1 and 4 tie
    assert set(_support(_params(top_k=100))) <= set(range(6))


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    first = torch.softmax(LOGITS[0], dim=-1)[0].item()
    assert set(_support(_params(top_p=first - 0.01))) == {0}
    assert set(_support(_params(top_p=first + 0.01))) == {0, 1, 4}
    assert set(_support(_params(top_p=1e-9))) == {0}


def test_top_p_counts_within_top_k() -> None:
    assert set(_support(_params(top_k=1, top_p=0.999))) == {0}


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
    others=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 100.0]),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_the_batch_does_not_change_a_draw(
    logits: list[float], others: int, temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    row = torch.tensor([logits])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    alone = sample(row, [params], [position])[0]
    noise = torch.randn(others, len(logits), generator=torch.Generator().manual_seed(1))
    batch = [_params(seed=i) for i in range(others)]
    assert sample(torch.cat((noise, row)), [*batch, params], [*range(others), position])[-1] == alone
    assert 0 <= alone < len(logits)
    if temperature == 1e-6:
        assert logits[alone] >= max(logits) - 1e-3


def test_a_token_of_no_weight_is_never_drawn() -> None:
    row = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert {sample(row, [_params(seed=s)], [0])[0] for s in range(200)} == {1}


def test_draws_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position, turn) for seed in range(25) for position in range(25) for turn in range(4)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= n < 1.0 for n in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
    assert uniform(2**63 - 1, 5) == uniform(2**63 - 1, 5)


def test_logits_that_overflowed_still_give_an_id() -> None:
    """The request's tokens are worthless, but no other's may suffer: an id out of range would end the engine."""
    sound = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    for bad in (float("nan"), float("inf"), float("-inf")):
        for changes in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.0}, {"logprobs": 3}):
            params = SamplingParams(**({"temperature": 1.0, "seed": 1} | changes))
            logits = torch.full((1, 50), bad)
            logits[0, :7] = 0.0 if bad > 0 else bad
            first, second = sample(torch.cat((logits, sound)), [params, params], [3, 3])
            assert 0 <= first < 50
            assert [second] == sample(sound, [params], [3])
