"""The load generator against a scripted service, and its conversations against a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.load import Lag, Load, Outcome, run_load
from experiments.workloads.arrivals import ClosedLoop, all_at_once, random_arrivals
from experiments.workloads.conversation import Conversation, Turn
from experiments.workloads.synthetic import Fixed, Synthetic
from pdserve import AsyncClient
from pdserve.core.errors import InvalidRequest, NotReady, PdserveError
from pdserve.core.request import Mode
from tests.local_cluster import LocalCluster
from tests.pdserve.scripted_service import ScriptedService
from tests.pdserve.test_client import free_target

FOREVER = 1 << 60


def prompts(count: int, output_len: int = 3) -> Iterator[Conversation]:
    return Synthetic(Fixed(20), Fixed(output_len)).conversations(count, 0, 1000)


async def loaded(service: ScriptedService, conversations: Any, schedule: Any, **options: Any) -> Load:
    async with AsyncClient(service.target) as client:
        return await run_load(client, conversations, schedule, **{"mode": Mode.PD, **options})


@pytest.mark.parametrize("rate", [None, 100.0])
async def test_every_request_has_an_outcome(service: ScriptedService, rate: float | None) -> None:
    done: list[Outcome] = []
    schedule = ClosedLoop(3) if rate is None else random_arrivals(rate, 0)
    load = await loaded(service, prompts(10), schedule, on_done=done.append)
    assert [outcome.index for outcome in load.outcomes] == list(range(10))
    assert sorted(done, key=lambda outcome: outcome.index) == load.outcomes
    assert (load.unsent, load.stopped) == (0, False)
    for outcome in load.outcomes:
        assert outcome.generation is not None
        assert (outcome.turn, outcome.mode, outcome.prompt_tokens) == (0, Mode.PD, 20)
        assert 0 <= outcome.scheduled_s <= outcome.sent_s < outcome.ended_s <= load.duration_s
    if rate is not None:
        times_s = list(itertools.islice(random_arrivals(rate, 0), 10))
        assert [outcome.scheduled_s for outcome in load.outcomes] == times_s
    assert all(request.sampling.ignore_eos for request in service.servicer.requests)
    assert len({request.salt for request in service.servicer.requests} - {""}) == 10, "each must find a cold cache"


@pytest.mark.parametrize(
    ("schedule", "output_len", "options", "most"),
    [(ClosedLoop(3), 3, {}, 3), (all_at_once(), 10, {"max_concurrency": 2}, 2)],
)
async def test_concurrency_is_bounded_and_shows_as_lag_in_an_open_loop(
    service: ScriptedService, schedule: Any, output_len: int, options: dict[str, int], most: int
) -> None:
    load = await loaded(service, prompts(12, output_len), schedule, **options)
    edges = sorted((at_s, step) for o in load.outcomes for at_s, step in ((o.sent_s, 1), (o.ended_s, -1)))
    assert max(itertools.accumulate(step for _, step in edges)) <= most
    if options:
        assert {outcome.scheduled_s for outcome in load.outcomes} == {0.0}
        assert load.lag is not None
        assert load.lag.max_ms >= 5 * 20  # five requests before the last one, of ten steps of 2 ms
        assert load.lag.behind


@pytest.mark.parametrize("schedule", [ClosedLoop(2), random_arrivals(50.0, 0)])
async def test_nothing_is_sent_after_the_duration(service: ScriptedService, schedule: Any) -> None:
    load = await loaded(service, prompts(FOREVER), schedule, duration_s=0.5)
    assert len(load.outcomes) > 3
    assert all(outcome.sent_s < 0.5 and outcome.generation is not None for outcome in load.outcomes)
    assert not load.stopped


async def test_requests_that_never_got_their_turn_are_counted(service: ScriptedService) -> None:
    load = await loaded(service, prompts(50, 20), all_at_once(), max_concurrency=1, duration_s=0.2)
    assert load.unsent > 0
    assert load.unsent + len(load.outcomes) == 50


@pytest.mark.parametrize("schedule", [ClosedLoop(3), random_arrivals(100.0, 0)])
async def test_a_load_that_is_stopped_returns_what_had_finished(service: ScriptedService, schedule: Any) -> None:
    done: list[Outcome] = []
    stop = asyncio.Event()

    def on_done(outcome: Outcome) -> None:
        done.append(outcome)
        if len(done) == 5:
            stop.set()

    async with AsyncClient(service.target) as client:
        conversations = prompts(FOREVER, 50)
        load = await run_load(client, conversations, schedule, mode=Mode.PD, on_done=on_done, stop=stop)
        assert load.stopped
        assert sorted(done, key=lambda outcome: outcome.index) == load.outcomes
        assert all(outcome.generation is not None for outcome in load.outcomes)
        await asyncio.sleep(1.0)  # what was on its way is there
        asked = len(service.servicer.requests)
        await asyncio.sleep(0.5)
        assert len(service.servicer.requests) == asked


async def test_the_mode_can_depend_on_the_conversation(service: ScriptedService) -> None:
    load = await loaded(service, prompts(4), ClosedLoop(1), mode=lambda index: list(Mode)[1 + index % 2])
    assert [o.mode for o in load.outcomes] == [Mode.PD, Mode.COLOCATED] * 2
    assert [o.generation and o.generation.mode for o in load.outcomes] == ["pd", "colocated"] * 2


async def test_a_turn_goes_on_from_the_answer_that_was_generated(service: ScriptedService) -> None:
    talk = Conversation((Turn((1, 2), 3), Turn((4,), 2, pause_s=0.1), Turn((5,), 1)))
    load = await loaded(service, [talk], ClosedLoop(1))
    asked = [list(request.token_ids.ids) for request in service.servicer.requests]
    generations = [outcome.generation for outcome in load.outcomes]
    answers = [list(generation.token_ids) for generation in generations if generation is not None]
    assert asked[1] == [1, 2, *answers[0], 4]
    assert asked[2] == [1, 2, *answers[0], 4, *answers[1], 5]
    assert [outcome.turn for outcome in load.outcomes] == [0, 1, 2]
    assert len({request.salt for request in service.servicer.requests}) == 1
    first, second, third = load.outcomes
    assert second.scheduled_s - first.ended_s >= 0.1
    assert second.lag_s >= 0
    texts = Conversation((Turn((), 2, text="hello"), Turn((), 2, text=" again")))
    load = await loaded(service, [texts], ClosedLoop(1))
    assert load.outcomes[0].generation is not None
    assert service.servicer.requests[-1].text == f"hello{load.outcomes[0].generation.text} again"
    assert load.outcomes[1].prompt_tokens == len(service.servicer.requests[-1].text)
    assert third.generation is not None


async def test_a_failed_turn_ends_its_conversation_only(service: ScriptedService) -> None:
    fails = Conversation((Turn((), 2, text="fail UNAVAILABLE none is ready"), Turn((), 2, text="x")))
    load = await loaded(service, [fails, *prompts(2)], ClosedLoop(1))
    assert [(o.index, o.turn, o.error is None) for o in load.outcomes] == [(0, 0, False), (1, 0, True), (2, 0, True)]
    assert load.outcomes[0].prompt_tokens is None
    assert "none is ready" in str(load.outcomes[0].error)


@pytest.mark.parametrize("schedule", [ClosedLoop(2), random_arrivals(100.0, 0)])
async def test_an_error_of_the_workload_is_raised_as_it_is(service: ScriptedService, schedule: Any) -> None:
    def broken() -> Iterator[Conversation]:
        yield from prompts(3)
        raise InvalidRequest("file:4: is wrong")

    with pytest.raises(InvalidRequest, match="file:4: is wrong"):
        await loaded(service, broken(), schedule)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"duration_s": 0.0}, "duration"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_concurrency": 3}, "max_concurrency"),
    ],
)
async def test_wrong_options_are_refused(service: ScriptedService, options: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        await loaded(service, prompts(1), ClosedLoop(1), **options)
    assert not service.servicer.requests


async def test_a_service_that_does_not_answer_is_an_error() -> None:
    async with AsyncClient(free_target()) as client:
        with pytest.raises(NotReady):
            await run_load(client, prompts(1), ClosedLoop(1), mode=Mode.PD)


def lag_of(lag_s: float, gap_s: float) -> Lag:
    error = PdserveError("")
    outcomes = [Outcome(i, 0, Mode.PD, i * gap_s, i * gap_s + lag_s, 99.0, 1, None, error) for i in range(11)]
    lag = Lag.of(outcomes)
    assert lag is not None
    assert lag.p50_ms == pytest.approx(lag_s * 1e3)
    return lag


def test_when_a_load_is_behind() -> None:
    assert Lag.of([]) is None
    assert lag_of(0.011, gap_s=10.0).behind
    assert not lag_of(0.009, gap_s=10.0).behind
    assert lag_of(0.006, gap_s=0.1).behind
    assert not lag_of(0.004, gap_s=0.1).behind
    assert not lag_of(0.0015, gap_s=0.001).behind, "timers are not that accurate"
    assert lag_of(0.0025, gap_s=0.001).behind


async def test_a_real_service_caches_the_turns_and_the_shared_prefixes(tcp_service: LocalCluster) -> None:
    def cached(load: Load) -> list[int]:
        assert all(outcome.error is None for outcome in load.outcomes), load
        return [o.generation.prefill_cached_tokens for o in load.outcomes if o.generation is not None]

    async with AsyncClient(tcp_service.target) as client:
        turns = Synthetic(Fixed(64), Fixed(8), turns=3).conversations(2, 0, 200)
        load = await run_load(client, turns, ClosedLoop(1), mode=Mode.PD)
        assert [outcome.prompt_tokens for outcome in load.outcomes] == [64, 136, 208] * 2
        first, second = cached(load)[:3], cached(load)[3:]
        assert first == second
        assert first[0] == 0 < first[1] < first[2]
        prefixes = Synthetic(Fixed(16), Fixed(2), prefix_len=128)
        for _ in range(2):  # each load begins with a cold cache
            load = await run_load(client, prefixes.conversations(3, 0, 200), ClosedLoop(1), mode=Mode.PD)
            assert cached(load) == [0, 128, 128]
        load = await run_load(client, prefixes.conversations(2, 0, 200), random_arrivals(20.0, 0), mode=Mode.PD)
        assert len(load.outcomes) == 2
    assert tcp_service.wait_idle().used_blocks == 0
