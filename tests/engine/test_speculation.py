"""What guesses the next tokens, how many guesses a step verifies, and that they change no token and no distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from contract.engine import KVRole, Submit
from engine.core import ComputedStep, EngineCore
from engine.model.sampler import sample
from engine.scheduling.batch import LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.speculation import (
    MAX_DRAFTS,
    MAX_LOOKBACK,
    DraftContext,
    Drafter,
    NgramDrafter,
    Speculation,
    StepTimes,
)
from pdserve.core.clock import FakeClock, MonotonicClock
from tests.engine.harness import BLOCK, Outbox, make_core, submit

CONFIG = SchedulerConfig(512, 16, 4096, BLOCK, 2048, prefix_caching=False)


def ngrams(*texts: Sequence[int], most: int = 3) -> list[int]:
    """The guess after the last of ``texts``, each of which goes on the one before it."""
    drafter, guess = NgramDrafter(), list[int]()
    for text in texts:
        [guess] = drafter.propose([DraftContext("r", text, [], most)])
        assert drafter.prepare([DraftContext("r", text, [], most)], 0) == [len(guess)]
    return guess


def test_ngrams_guess_what_followed_the_last_time() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 9, 1, 2, 3]
    assert ngrams(text) == [7, 8, 9]
    assert ngrams(text, most=1) == [7]
    assert ngrams(text, most=0) == []
    assert ngrams([1, 2, 3, 4, 5]) == []
    assert ngrams([1, 2]) == []


def test_ngrams_learn_from_the_output() -> None:
    drafter, text = NgramDrafter(), [1, 2, 3]
    for token, guess in ((4, []), (1, []), (2, []), (3, []), (4, [4, 1, 2])):
        assert drafter.propose([DraftContext("r", text, [], 3)]) == [guess]
        text.append(token)
    drafter.forget("r")
    assert drafter.propose([DraftContext("r", [4, 1, 2, 3], [], 3)]) == [[]]


def test_what_repeats_is_guessed_beyond_its_end() -> None:
    assert ngrams([7] * 4, most=5) == [7] * 5
    assert ngrams([1, 2, 3, 4, 1, 2, 3], most=6) == [4, 1, 2, 3, 4, 1]


def test_ngrams_search_the_end_of_a_long_prompt() -> None:
    text = [1, 2, 3, *[0] * MAX_LOOKBACK, 5, 6, 8, 1, 2, 3]
    assert ngrams(text) == []
    assert ngrams(text, [*text, 5, 6, 8], most=2) == [1, 2]


def test_times_of_steps_are_two_parallel_lines() -> None:
    times = StepTimes()
    assert times.seconds(1, drafting=False) is None
    for rows in (1, 2, 3, 4, 9):
        for drafting in (False, True):
            times.observe(rows, drafting, seconds=5.0)  # not counted
    for rows in (1, 2, 1):
        times.observe(rows, drafting=False, seconds=0.010 + 0.002 * rows)
    assert times.seconds(1, drafting=True) is None
    for rows in (4, 9, 4):
        times.observe(rows, drafting=True, seconds=0.015 + 0.002 * rows)
    assert times.row_s == pytest.approx(0.002)
    assert times.seconds(3, drafting=False) == pytest.approx(0.016)
    assert times.seconds(5, drafting=True) == pytest.approx(0.025)
    for _ in range(200):
        times.observe(4, drafting=True, seconds=0.023)
    assert times.seconds(3, drafting=False) is None  # what was learnt long ago is tried again


def test_the_cost_of_a_row_is_at_most_the_difference_of_both_kinds() -> None:
    times = StepTimes()
    for _ in range(4):
        times.observe(1, drafting=False, seconds=0.010)
        times.observe(5, drafting=True, seconds=0.018)
    assert times.row_s == pytest.approx(0.002)


def test_acceptance_follows_the_guesses() -> None:
    speculation = Speculation(always=False)
    assert speculation.acceptance == 0.5
    for _ in range(40):
        speculation.observe(3, 3, 0.0)
    assert speculation.acceptance > 0.98
    assert speculation.gain(2, 0.5) > 0.9
    for _ in range(40):
        speculation.observe(0, 5, 0.0)
    assert speculation.acceptance < 0.02
    assert speculation.gain(1, 0.5) == 0.0


class OnDevice(NamedTuple):
    """A step that a device ends at ``end_s``."""

    clock: FakeClock
    end_s: float
    sampled: dict[str, list[SampledToken]]

    def sample(self) -> None:
        """Does nothing."""

    def tokens(self) -> dict[str, list[SampledToken]]:
        """Wait for its end."""
        self.clock.advance(max(0.0, self.end_s - self.clock.now()))
        return self.sampled


class Repeating:
    """A runner whose steps take a fixed time and one for each row, one after the other, and whose tokens repeat a
    period of four."""

    def __init__(self, clock: FakeClock, fixed_s: float, row_s: float) -> None:
        self._clock, self._fixed_s, self._row_s = clock, fixed_s, row_s
        self._end_s = 0.0
        self.drafts: list[int] = []

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> OnDevice:
        """See `engine.core.Runner`."""
        rows = sum(len(seq.token_ids) for seq in seqs)
        self._end_s = max(self._end_s, self._clock.now()) + self._fixed_s + self._row_s * rows
        self.drafts.append(sum(seq.num_drafts for seq in seqs))
        return OnDevice(
            self._clock,
            self._end_s,
            {
                seq.attempt_id: [SampledToken(place % 4) for place in range(seq.end - seq.num_drafts, seq.end + 1)]
                for seq in seqs
                if seq.sample
            },
        )


class Costly(Drafter):
    """Guesses right, in passes that take ``pass_s`` each, those of its sixth call two seconds longer."""

    free = False

    def __init__(self, clock: FakeClock, pass_s: float) -> None:
        self._clock, self._pass_s, self._calls = clock, pass_s, 0

    def prepare(self, contexts: Sequence[DraftContext], budget: int) -> list[int]:
        """See `Drafter`."""
        return [context.most for context in contexts]

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`."""
        self._calls += 1
        self._clock.advance(self._pass_s * max(context.most for context in contexts) + 2.0 * (self._calls == 6))
        return [[(len(c.token_ids) + number) % 4 for number in range(c.most)] for c in contexts]


def repeat(
    fixed_s: float,
    row_s: float,
    num_requests: int,
    pass_s: float | None = None,
    *,
    num_tokens: int = 200,
    run_ahead: bool = False,
    **sampling: Any,
) -> tuple[float, list[int], Outbox]:
    """Tokens per second, drafts of each step, and what was told. With ``pass_s`` the drafter is `Costly`."""
    clock = FakeClock()
    runner, outbox = Repeating(clock, fixed_s, row_s), Outbox()
    drafter = NgramDrafter() if pass_s is None else Costly(clock, pass_s)
    core = EngineCore(Scheduler(CONFIG, clock, None, drafter), runner, clock, outbox, run_ahead)
    for number in range(num_requests):
        core.take(submit(str(number), KVRole.LOCAL, [0], num_tokens, ignore_eos=True, **sampling))
    while core.step():
        pass
    told = sum(map(len, outbox.tokens.values()))
    assert told == num_tokens * num_requests
    return told / clock.now(), runner.drafts, outbox


@pytest.mark.parametrize("num_requests", [1, 16])
def test_drafts_are_verified_while_rows_are_cheap(num_requests: int) -> None:
    plain, none, _ = repeat(0.010, 0.00001, num_requests, speculation=False)
    speculating, drafts, outbox = repeat(0.010, 0.00001, num_requests)
    assert not any(none)
    assert max(drafts) == num_requests * MAX_DRAFTS
    assert speculating > 4 * plain
    assert sum(token.accepted_draft_tokens for token in outbox.tokens["0"]) == 200 - len(drafts)  # one more per step


@pytest.mark.parametrize("num_requests", [1, 16])
def test_drafts_are_left_out_where_rows_cost_as_much_as_steps(num_requests: int) -> None:
    """But for those from which this is learnt, and those of requests that insist."""
    plain, _, _ = repeat(0.0, 0.010, num_requests, speculation=False)
    speculating, drafts, _ = repeat(0.0, 0.010, num_requests)
    assert speculating > 0.97 * plain
    assert sum(map(bool, drafts)) < 8
    assert sum(map(bool, repeat(0.0, 0.010, num_requests, speculation=True)[1])) > 20


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_passes_of_a_draft_model_pay_or_are_left_out(num_requests: int, run_ahead: bool) -> None:
    """One that took long, which may be chance, does not end them."""
    more: dict[str, Any] = {"num_tokens": 2000, "run_ahead": run_ahead}
    plain, _, _ = repeat(0.010, 0.0001, num_requests, 0.0005, speculation=False, **more)
    cheap, drafts, _ = repeat(0.010, 0.0001, num_requests, 0.0005, **more)
    assert cheap > 2 * plain
    assert sum(map(bool, drafts)) > 0.6 * len(drafts)
    costly, drafts, _ = repeat(0.010, 0.0001, num_requests, 0.02, **more)
    assert sum(map(bool, drafts)) < 0.03 * len(drafts)
    assert costly > 0.8 * plain


def test_steps_tell_the_time_of_a_draft_model() -> None:
    """It never computes beside a step, whose end would be seen too late: here beside that of another request."""
    clock = FakeClock()
    runner, outbox = Repeating(clock, 0.010, 0.0001), Outbox()
    core = EngineCore(Scheduler(CONFIG, clock, None, Costly(clock, 0.002)), runner, clock, outbox, run_ahead=True)
    for name, speculation in (("a", True), ("b", False)):
        core.take(submit(name, KVRole.LOCAL, [0], 200, ignore_eos=True, speculation=speculation))
    while core.step():
        pass
    drafted = [step for step in outbox.steps if step.drafted_s is not None]
    assert len(drafted) > 20
    for step in outbox.steps:
        began_s = step.drafted_s or step.step_started_s
        assert step.sampled_s - began_s == pytest.approx(0.0102, abs=0.001)
        if step.drafted_s is not None:
            assert step.drafted_s - step.step_started_s >= 0.002


def test_drafts_take_no_block_from_others() -> None:
    """They have what is free beyond the watermark, and the budget that prompts leave."""
    clock = FakeClock()
    runner, outbox = Repeating(clock, 0.010, 0.0), Outbox()
    config = SchedulerConfig(64, 4, 1024, BLOCK, 12, prefix_caching=False)
    scheduler = Scheduler(config, clock, None, NgramDrafter())
    core = EngineCore(scheduler, runner, clock, outbox)
    for name in "ab":
        core.take(submit(name, KVRole.LOCAL, [0], 48 - 1, ignore_eos=True))
    while core.step():
        assert scheduler.load().preemptions == 0
    assert {name: len(tokens) for name, tokens in outbox.tokens.items()} == {"a": 47, "b": 47}
    assert scheduler.blocks.free_blocks == 12


def test_who_insists_is_refused_where_nothing_guesses() -> None:
    scheduler = Scheduler(CONFIG, FakeClock())
    core, outbox = make_core(Repeating(FakeClock(), 0.0, 0.0), scheduler)
    core.take(submit("r", KVRole.LOCAL, [1], 2, speculation=True))
    core.step()
    assert "speculation: this service has none" in outbox.rejected["r"]


class Drawing:
    """A runner that draws from one distribution, by the real sampler, and puts the token 3 in place of others, so often
    that it is ``bias`` more likely."""

    def __init__(self, probabilities: Sequence[float], bias: float) -> None:
        self._logits = torch.tensor(probabilities).log()
        self._every = round((1 - probabilities[3]) / bias) if bias else 0
        self._count = 0

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> ComputedStep:
        """See `engine.core.Runner`."""
        rows = [(seq, place) for seq in seqs for place in range(seq.end - seq.num_drafts, seq.end + 1)]
        logits = self._logits.expand(len(rows), -1)
        tokens = sample(logits, [seq.params for seq, _ in rows], [place for _, place in rows])
        drawn: dict[str, list[SampledToken]] = {}
        for (seq, _), token in zip(rows, tokens, strict=True):
            self._count += 1
            biased = self._every and self._count % self._every == 0
            drawn.setdefault(seq.attempt_id, []).append(SampledToken(3) if biased else token)
        return ComputedStep(drawn)


class Threes(Drafter):
    """Guesses that all tokens are 3."""

    def prepare(self, contexts: Sequence[DraftContext], budget: int) -> list[int]:
        """See `Drafter`."""
        return [context.most for context in contexts]

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`."""
        return [[3] * context.most for context in contexts]


PROBABILITIES = (0.05, 0.25, 0.1, 0.4, 0.2)


def deviation(bias: float, drafts: bool) -> float:
    """By how many standard deviations the least likely count of a token misses what is expected of its draws."""
    config = SchedulerConfig(2048, 256, 64, BLOCK, 2048, prefix_caching=False)
    scheduler = Scheduler(config, MonotonicClock(), None, Threes())
    core, outbox = make_core(Drawing(PROBABILITIES, bias), scheduler)
    for number in range(8_000):
        core.take(drawn(number, drafts))
    while core.step():
        pass
    counts = Counter(token for tokens in outbox.token_ids.values() for token in tokens[1:])  # the first are no drafts
    total = counts.total()
    assert total == 8_000 * 9
    assert (scheduler.load().accepted_draft_tokens > total / 5) == drafts
    return max(abs(counts[token] - total * p) / math.sqrt(total * p * (1 - p)) for token, p in enumerate(PROBABILITIES))


def drawn(number: int, drafts: bool) -> Submit:
    """A request for sampled tokens."""
    return submit(str(number), KVRole.LOCAL, [1], 10, temperature=1.0, seed=number, ignore_eos=True, speculation=drafts)


def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    assert deviation(0.0, drafts=True) < 4
    assert deviation(0.0, drafts=False) < 4


def test_a_bias_of_one_percent_would_be_seen() -> None:
    assert deviation(0.01, drafts=True) > 5
