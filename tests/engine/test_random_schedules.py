"""The real scheduler and the real model under drawn schedules: whatever runs beside a request, however its prompt is
cut, found in the cache, preempted or outlived by aborted ones, its tokens are those of its lone run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import KVRole, Rejected, Submit
from engine.model.runner import ModelRunner
from engine.scheduling.baselines import StaticBatching, StaticWholePrompts, WholePrompts
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import MonotonicClock
from tests.engine.harness import BLOCK, make_runner, submit
from tests.engine.integrity import check_scheduler
from tests.random_models import save_random_model

POOL_BLOCKS = 64
TOPICS = [[(7 * i + 31 * topic) % 307 for i in range(64)] for topic in range(3)]
MAX_STEPS = 600


@dataclass(frozen=True)
class Plan:
    """One request: when it comes, what it asks for, and when (if ever) it is aborted."""

    tick: int
    topic: int
    prompt_tokens: int
    max_tokens: int
    temperature: float
    repetition_penalty: float
    salt: str
    aborted_after: int | None

    def submit(self, name: str) -> Submit:
        """As the engine gets it."""
        return submit(
            name,
            KVRole.LOCAL,
            TOPICS[self.topic][: self.prompt_tokens],
            self.max_tokens,
            temperature=self.temperature,
            top_p=0.95,
            seed=self.topic,
            ignore_eos=True,
            repetition_penalty=self.repetition_penalty,
            salt=self.salt,
        )

    @property
    def question(self) -> tuple[object, ...]:
        """What its tokens depend on."""
        return self.topic, self.prompt_tokens, self.max_tokens, self.temperature, self.repetition_penalty


PLANS = st.lists(
    st.builds(
        Plan,
        tick=st.integers(0, 12),
        topic=st.integers(0, len(TOPICS) - 1),
        prompt_tokens=st.integers(1, len(TOPICS[0])),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
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


def run(
    runner: ModelRunner, config: SchedulerConfig, plans: list[Plan], kind: type[Scheduler] = Scheduler
) -> tuple[dict[str, list[int]], Scheduler]:
    """All tokens of the requests of ``plans``, and the scheduler as they leave it."""
    scheduler = kind(config, MonotonicClock())
    tokens: dict[str, list[int]] = {}
    for tick in range(MAX_STEPS):
        for i, plan in enumerate(plans):
            if plan.tick == tick:
                tokens[str(i)] = []
                scheduler.submit(plan.submit(str(i)))
            if plan.aborted_after is not None and plan.tick + plan.aborted_after == tick:
                scheduler.abort(str(i))
        assert not any(isinstance(event, Rejected) for event in scheduler.take_events())
        if not scheduler.has_work:
            if tick > 20:
                return tokens, scheduler
            continue
        output = scheduler.schedule()
        step = scheduler.update(output, runner.execute(output.seqs), 0.0)
        check_scheduler(scheduler)
        for token in step.tokens:
            tokens[token.attempt_id].append(token.token_id)
    raise AssertionError(f"still running after {MAX_STEPS} steps")


@pytest.fixture(scope="module", params=["gqa", "mistral_window"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A runner in float32; nothing resets its pool between schedules, so stale blocks are everywhere."""
    return make_runner(save_random_model(tmp_path_factory.mktemp("model"), request.param), POOL_BLOCKS)


@pytest.fixture(scope="module")
def lone_runs(runner: ModelRunner) -> dict[tuple[object, ...], list[int]]:
    """What was asked before, and the answer."""
    return {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIGS, plans=PLANS, kind=KINDS)
def test_tokens_are_those_of_the_lone_run(
    runner: ModelRunner,
    lone_runs: dict[tuple[object, ...], list[int]],
    config: SchedulerConfig,
    plans: list[Plan],
    kind: type[Scheduler],
) -> None:
    tokens, scheduler = run(runner, config, plans, kind)
    assert scheduler.blocks.free_blocks == config.num_blocks
    for i, plan in enumerate(plans):
        if plan.question not in lone_runs:
            alone = replace(plan, tick=0, salt="", aborted_after=None)
            lone_runs[plan.question] = run(runner, LONE, [alone])[0]["0"]
        expected = lone_runs[plan.question]
        if plan.aborted_after is None:
            assert tokens[str(i)] == expected
        else:
            assert tokens[str(i)] == expected[: len(tokens[str(i)])]


def test_schedules_like_these_do_preempt_and_share(runner: ModelRunner) -> None:
    """Else the test above would show nothing of either."""
    config = SchedulerConfig(
        max_num_batched_tokens=48, max_num_seqs=6, max_model_len=128, block_size=BLOCK, num_blocks=10
    )
    plans = [Plan(2 * i, i % 2, 16, 12, 0.0, 1.0, "", None) for i in range(6)]
    tokens, scheduler = run(runner, config, plans)
    load = scheduler.load()
    assert load.preemptions > 0
    assert load.prompt_tokens_cached > 0
    lone = [run(runner, LONE, [Plan(0, topic, 16, 12, 0.0, 1.0, "", None)])[0]["0"] for topic in (0, 1)]
    assert [tokens[str(i)] for i in range(6)] == lone * 3


@pytest.mark.parametrize("left_behind", [float("nan"), float("inf")])
def test_what_an_overflowed_request_left_in_its_blocks_reaches_no_other(
    runner: ModelRunner, left_behind: float
) -> None:
    plans = [Plan(i, i, 5 + 9 * i, 12, 0.0, 1.0, "", None) for i in range(3)]
    config = SchedulerConfig(
        max_num_batched_tokens=20, max_num_seqs=4, max_model_len=128, block_size=BLOCK, num_blocks=POOL_BLOCKS
    )
    expected, _ = run(runner, config, plans)
    runner._pool.tensor.fill_(left_behind)
    tokens, _ = run(runner, config, plans)
    assert tokens == expected
