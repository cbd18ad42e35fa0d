"""The cost model recovers planted coefficients, and what spoils measurements does not spoil it."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cost_model import (
    MAX_LINES,
    MIN_SAMPLES,
    PER_SIZE,
    CostModel,
    Costs,
    Estimate,
    Served,
    fit,
)

P, D, LINK = "prefill cpu", "decode cpu", "within a host"


def served(rng: random.Random, noise: float = 0.0, outliers: float = 0.0, **changes: object) -> Served:
    """A request of a deployment with known costs: prefill 3 ms + 0.2 ms/token + 0.1 ms per token before it, hand-off
    1 ms + 0.4 ms/MB, decode 5 ms + 0.5 ms per request."""

    def measured(seconds: float) -> float:
        if rng.random() < outliers:
            return seconds * rng.choice([20.0, 100.0]) + 1.0
        return seconds * rng.lognormvariate(0.0, noise)

    tokens, ahead, beside = rng.choice([8, 40, 200, 900, 3000]), rng.choice([0, 0, 500, 2000]), rng.choice([0, 4])
    decoding, kv_bytes = rng.randint(1, 16), tokens * 20_000
    fields = {
        "prefill_on": P,
        "uncached_tokens": tokens,
        "tokens_ahead": ahead,
        "decoding_beside": beside,
        "prefill_s": measured(3e-3 + 2e-4 * tokens + 1e-4 * ahead + 1e-3 * beside),
        "decode_on": D,
        "link": LINK,
        "kv_bytes": kv_bytes,
        "handoff_s": measured(1e-3 + 0.4e-9 * kv_bytes),
        "decoding": decoding,
        "itl_s": measured(5e-3 + 5e-4 * decoding),
    }
    return Served(**{**fields, **changes})  # type: ignore[arg-type]


def learned(count: int, noise: float = 0.0, outliers: float = 0.0, seed: int = 1) -> Costs:
    rng, model = random.Random(seed), CostModel()
    for _ in range(count):
        model.note(served(rng, noise, outliers))
    return model.refit()


def test_it_starts_empty_and_predicts_nothing_before_there_is_enough() -> None:
    model, rng = CostModel(), random.Random(1)
    for count in range(MIN_SAMPLES):
        costs = model.refit()
        assert costs.requests == count
        assert costs.prefill == costs.handoff == costs.decode == {}
        assert costs.describe() == []
        model.note(served(rng))
    assert model.costs.prefill == {}  # fitted on demand only
    assert model.refit().prefill.keys() == {P}
    assert model.handoffs == MIN_SAMPLES


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 0.1, 0.3]), outliers=st.sampled_from([0.0, 0.1]))
def test_it_recovers_planted_costs_under_noise_and_outliers(seed: int, noise: float, outliers: float) -> None:
    """... within three times the margin, apart from the mean of skewed noise."""
    costs = learned(300, noise, outliers, seed)

    def check(estimate: Estimate, planted: float) -> None:
        assert abs(estimate.seconds - planted) <= 3 * estimate.margin_s + (0.01 + noise**2) * planted
        assert estimate.margin_s <= (0.01 + noise) * planted

    for tokens, ahead, beside in [(40, 0, 0), (200, 0, 4), (3000, 0, 0), (900, 2000, 0)]:
        prefill = costs.prefill[P].at(1, tokens, ahead, beside)
        check(prefill, 3e-3 + 2e-4 * tokens + 1e-4 * ahead + 1e-3 * beside)
    for kv_bytes in (200_000, 60_000_000):
        check(costs.handoff[LINK].at(1, kv_bytes), 1e-3 + 0.4e-9 * kv_bytes)
    for decoding in (1, 8, 16):
        check(costs.decode[D].at(1, decoding), 5e-3 + 5e-4 * decoding)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.tuples(st.just(1.0), st.floats(0, 1e9), st.floats(0, 1e5)), st.floats(1e-6, 1e3)),
        min_size=MIN_SAMPLES,
        max_size=64,
    )
)
def test_no_prediction_is_ever_negative(rows: list[tuple[tuple[float, ...], float]]) -> None:
    line = fit(rows, {}, len(rows))
    assert all(coefficient >= 0 for coefficient in line.coefficients)
    for features, _ in rows:
        seconds, margin_s = line.at(*features)
        assert seconds >= 0
        assert margin_s >= 0


def test_its_margin_says_how_little_it_knows() -> None:
    """Margins shrink with measurements, and grow away from them."""
    few, many = learned(24, 0.3), learned(400, 0.3)
    near_few, near_many = few.prefill[P].at(1, 200, 0, 0), many.prefill[P].at(1, 200, 0, 0)
    assert near_many.margin_s < near_few.margin_s
    rng, model = random.Random(3), CostModel()
    for _ in range(60):
        model.note(served(rng, 0.2, uncached_tokens=50, prefill_s=0.013 * rng.lognormvariate(0, 0.2)))
    same, far = model.refit().prefill[P].at(1, 50, 0, 0), model.refit().prefill[P].at(1, 5000, 0, 0)
    assert same.margin_s < 0.2 * same.seconds
    assert far.margin_s > 0.5 * far.seconds  # every prompt had the same length


def test_prompts_of_one_length_do_not_displace_the_others() -> None:
    rng, model = random.Random(5), CostModel()
    for _ in range(100):
        model.note(served(rng, 0.1))
    for _ in range(1000):
        model.note(served(rng, 0.1, uncached_tokens=40, tokens_ahead=0, decoding_beside=0, prefill_s=0.011))
    long = model.refit().prefill[P].at(1, 3000, 0, 0)
    assert long.seconds == pytest.approx(0.603, rel=0.1)


def test_it_follows_a_change() -> None:
    rng, model = random.Random(7), CostModel()
    for factor in (1.0, 3.0):
        for _ in range(400):
            one = served(rng, 0.1)
            model.note(served(rng, uncached_tokens=one.uncached_tokens, tokens_ahead=0, decoding_beside=0,
                              prefill_s=factor * (3e-3 + 2e-4 * one.uncached_tokens)))  # fmt: skip
        now = model.refit().prefill[P].at(1, 900, 0, 0)
        assert now.seconds == pytest.approx(factor * 0.183, rel=0.05)


def test_a_prompt_before_another_counts_as_one_of_its_tokens_until_that_is_measured() -> None:
    rng, model = random.Random(9), CostModel()
    for _ in range(50):
        model.note(served(rng, tokens_ahead=0, decoding_beside=0, uncached_tokens=(n := rng.randint(10, 500)),
                          prefill_s=3e-3 + 2e-4 * n))  # fmt: skip
    alone, behind = model.refit().prefill[P].at(1, 100, 0, 0), model.refit().prefill[P].at(1, 100, 1000, 0)
    assert behind.seconds - alone.seconds == pytest.approx(0.2, rel=0.01)
    assert behind.margin_s >= 0.19


def test_its_memory_is_bounded() -> None:
    rng, model = random.Random(11), CostModel()
    tracemalloc.start()
    try:
        for _ in range(500):
            model.note(served(rng))
        before, _ = tracemalloc.get_traced_memory()
        for index in range(5000):
            kind = f"kind {index % 100}"
            model.note(served(rng, prefill_on=kind, decode_on=kind, link=kind, uncached_tokens=rng.randint(1, 10**6)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(model.refit().prefill) <= MAX_LINES
    # A measurement is a few hundred bytes; sizes are powers of two up to 2**35.
    assert after - before < 3 * MAX_LINES * 36 * PER_SIZE * 400


def test_it_says_what_it_knows_in_words() -> None:
    lines = learned(400).describe()
    assert lines == [
        "prefill on a prefill cpu worker: 0.2 ms/token + 3 ms, and 0.1 ms per token that waits before it "
        "(from 400 requests)",
        "hand-off within a host: 1 ms + 0.4 ms/MB (from 400 requests)",
        "decode on a decode cpu worker: 5.5 ms/token alone, 9 ms/token at 8 running (from 400 requests)",
    ]
