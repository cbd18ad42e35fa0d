"""The real scheduler and the real model under drawn schedules: whatever runs beside a request, however its prompt is
cut, found in the cache, preempted or outlived by aborted ones, its tokens are those of its lone run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.engine import Abort, KVRole, Submit, TokenOut
from engine.model.draft_model import DraftModel
from engine.model.runner import ModelRunner
from engine.scheduling.baselines import StaticBatching, StaticWholePrompts, WholePrompts
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.speculation import Drafter
from experiments.engine_alone.guessing import PlantedDrafter
from pdserve.core.clock import MonotonicClock
from tests.engine.harness import BLOCK, make_core, make_runner, submit
from tests.engine.integrity import check_scheduler
from tests.random_models import save_random_model

POOL_BLOCKS = 64
TOPICS = [[(7 * i + 31 * topic) % 307 for i in range(64)] for topic in range(3)]
STOPS = tuple(range(0, 300, 9))  # so many that some random outputs end early
MAX_STEPS = 600


@dataclass(frozen=True)
class Plan:
    """One request: when it comes, what it asks for, whether stop ids end it, and when (if ever) it is aborted."""

    tick: int
    topic: int
    prompt_tokens: int
    max_tokens: int
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    stops: bool = False
    salt: str = ""
    aborted_after: int | None = None

    def submit(self, name: str, insists: bool = False) -> Submit:
        """As the engine gets it; if it ``insists``, with speculation."""
        return submit(
            name,
            KVRole.LOCAL,
            TOPICS[self.topic][: self.prompt_tokens],
            self.max_tokens,
            temperature=self.temperature,
            top_p=0.95,
            seed=self.topic,
            ignore_eos=True,
            stop_token_ids=STOPS if self.stops else (),
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=0.3 if self.topic else 0.0,
            logprobs=self.topic or None,
            salt=self.salt,
            speculation=True if insists else None,
        )


PLANS = st.lists(
    st.builds(
        Plan,
        tick=st.integers(0, 12),
        topic=st.integers(0, len(TOPICS) - 1),
        prompt_tokens=st.integers(1, len(TOPICS[0])),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
        stops=st.booleans(),
        salt=st.sampled_from(["", "", "other"]),
        aborted_after=st.one_of(st.none(), st.none(), st.integers(0, 6)),
    ),
    min_size=1,
    max_size=8,
)
CONFIGS = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 80),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.just(128),
    block_size=st.just(BLOCK),
    num_blocks=st.integers(10, 40),  # the longest request alone needs 10
    prefix_caching=st.booleans(),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 40)),
)
KINDS = st.sampled_from([Scheduler, Scheduler, StaticBatching, WholePrompts, StaticWholePrompts])
LONE = SchedulerConfig(
    max_num_batched_tokens=128,
    max_num_seqs=1,
    max_model_len=128,
    block_size=BLOCK,
    num_blocks=POOL_BLOCKS,
    prefix_caching=False,
)


Told = list[tuple[Any, ...]]


def run(
    runner: ModelRunner,
    config: SchedulerConfig,
    plans: list[Plan],
    kind: type[Scheduler] = Scheduler,
    run_ahead: bool = False,
    drafter: Drafter | None = None,
) -> tuple[dict[str, Told], Scheduler]:
    """What the requests of ``plans`` are told, and the scheduler as they leave it. Logprobs of other batches differ in
    their last bits."""
    scheduler = kind(config, MonotonicClock(), None, drafter)
    core, outbox = make_core(runner, scheduler, run_ahead)
    last_tick = max(plan.tick + (plan.aborted_after or 0) for plan in plans)
    for tick in range(MAX_STEPS):
        for i, plan in enumerate(plans):
            if plan.tick == tick:
                core.take(plan.submit(str(i), isinstance(drafter, DraftModel)))
            if plan.aborted_after is not None and plan.tick + plan.aborted_after == tick:
                core.take(Abort(str(i)))
        busy = core.step()
        check_scheduler(scheduler)
        if not busy and tick >= last_tick:
            assert not outbox.rejected
            return {name: [_told(token) for token in tokens] for name, tokens in outbox.tokens.items()}, scheduler
    raise AssertionError(f"still running after {MAX_STEPS} steps")


def _told(token: TokenOut) -> tuple[Any, ...]:
    logprobs = token.logprobs
    return (
        *(token.token_id, token.finish_reason),
        logprobs and pytest.approx(logprobs.logprob, abs=1e-4),
        logprobs and [token_id for token_id, _ in logprobs.top],
    )


@pytest.fixture(scope="module", params=["gqa", "mistral_window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    """A runner in float32; nothing resets its pool between schedules, so stale blocks are everywhere. One of the two is
    batch invariant: without that, a draw next to the border between two tokens may become the other one."""
    return make_runner(folder, POOL_BLOCKS, batch_invariant=folder.name == "gqa")


@pytest.fixture(scope="module")
def drafting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    """Runners of draft models: guesses of the first are nearly always right, those of the second hardly ever."""
    other = save_random_model(tmp_path_factory.mktemp("draft"), "mqa")
    return {"same": make_runner(folder, POOL_BLOCKS), "other": make_runner(other, POOL_BLOCKS)}


@pytest.fixture(scope="module")
def lone_runs(runner: ModelRunner) -> dict[Plan, Told]:
    """What was asked before, and the answer."""
    return {}


def guesses(plans: list[Plan], answers: list[Told], right: float) -> PlantedDrafter:
    """Of the answers to plans, which are numbered."""
    texts = {
        str(i): [*plan.submit(str(i)).request.token_ids, *(token[0] for token in answer)]
        for i, (plan, answer) in enumerate(zip(plans, answers, strict=True))
    }
    return PlantedDrafter(texts, right, 307)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=CONFIGS,
    plans=PLANS,
    kind=KINDS,
    run_ahead=st.booleans(),
    right=st.sampled_from([None, 1.0, 0.7, "same", "other"]),
)
def test_tokens_are_those_of_the_lone_run(
    runner: ModelRunner,
    drafting: dict[str, ModelRunner],
    lone_runs: dict[Plan, Told],
    config: SchedulerConfig,
    plans: list[Plan],
    kind: type[Scheduler],
    run_ahead: bool,
    right: float | str | None,
) -> None:
    each = [replace(plan, tick=0, salt="", aborted_after=None) for plan in plans]
    for alone in each:
        if alone not in lone_runs:
            lone_runs[alone] = run(runner, LONE, [alone])[0]["0"]

    drafter: Drafter | None = None
    if isinstance(right, str):
        drafter = DraftModel(drafting[right], 100, 307)
    elif right is not None:
        drafter = guesses(plans, [lone_runs[alone] for alone in each], right)
    told, scheduler = run(runner, config, plans, kind, run_ahead, drafter)
    assert scheduler.blocks.free_blocks == config.num_blocks
    for i, (plan, alone) in enumerate(zip(plans, each, strict=True)):
        mine, expected = told.get(str(i), []), lone_runs[alone]
        assert mine == (expected if plan.aborted_after is None else expected[: len(mine)])


@pytest.mark.parametrize("run_ahead", [False, True])
def test_schedules_like_these_do_preempt_share_and_end_early(
    runner: ModelRunner, drafting: dict[str, ModelRunner], run_ahead: bool
) -> None:
    """Else the test above would show nothing of it."""
    config = SchedulerConfig(48, 6, 128, BLOCK, 10)
    plans = [Plan(2 * i, i % 3, 16, 12, 0.8, stops=True) for i in range(9)]
    told, scheduler = run(runner, config, plans, run_ahead=run_ahead)
    load = scheduler.load()
    assert load.preemptions > 0
    assert load.prompt_tokens_cached > 0
    assert {tokens[-1][1] for tokens in told.values()} == {"stop", "length"}
    assert any(token[2] is not None for tokens in told.values() for token in tokens)
    greedy = [replace(plan, topic=0, temperature=0.0, prompt_tokens=16 + i) for i, plan in enumerate(plans)]
    expected = run(runner, config, greedy, run_ahead=run_ahead)[0]
    for name in ("same", "other"):
        by_model = run(runner, config, greedy, run_ahead=run_ahead, drafter=DraftModel(drafting[name], 100, 307))
        assert by_model[0] == expected
        load = by_model[1].load()
        assert load.draft_tokens > 10
        assert (load.accepted_draft_tokens > 5) == (name == "same")
    drafter = guesses(plans, [told[str(i)] for i in range(len(plans))], 0.7)
    guessed = run(runner, config, plans, run_ahead=run_ahead, drafter=drafter)
    assert guessed[0] == told
    drafts, accepted = guessed[1].load().draft_tokens, guessed[1].load().accepted_draft_tokens
    assert 0 < accepted < drafts


@pytest.mark.parametrize("left_behind", [float("nan"), float("inf")])
def test_what_an_overflowed_request_left_in_its_blocks_reaches_no_other(
    runner: ModelRunner, left_behind: float
) -> None:
    plans = [Plan(i, i, 5 + 9 * i, 12) for i in range(3)]
    config = SchedulerConfig(20, 4, 128, BLOCK, POOL_BLOCKS)
    expected, _ = run(runner, config, plans)
    runner._pool.tensor.fill_(left_behind)
    tokens, _ = run(runner, config, plans)
    assert tokens == expected
