"""A simulated service: an idle request takes what its parts take, blocks are those of the arithmetic, and engines
schedule what the real engine schedules."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from contract.engine import Computed, CoreCommand, KVEvent, KVReady, KVRole, Release, Reserved
from engine.core import EngineCore, RunningStep
from engine.model.runner import ModelRunner
from engine.scheduling.batch import LayerHook, ScheduledSeq
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import FakeClock
from pdserve.core.config import RouterConfig
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Mode
from pdserve.core.worker import Role
from router.view import WaitMode
from simulator.loop import BEGIN_S, World, WorldLoop
from simulator.planning import service as planned
from simulator.planning.engine import PlannedEngine
from simulator.planning.service import (
    Failure,
    LinkClass,
    Overheads,
    PlannedRequests,
    PlannedService,
    PlannedTurn,
    PlannedWorker,
    RequestResult,
    ServiceRun,
    run_service,
)
from simulator.planning.step_time import MeasuredSteps, StepShape
from tests.engine.harness import BLOCK, Outbox, make_runner, submit
from tests.random_models import save_random_model

LAYOUT = KVLayout.uniform("planned", "bfloat16", 16, 4, 2, 64)
STEPS = MeasuredSteps((0.010, 0.0105, 0.011, 0.012, 0.02, 0.08, 0.32), 1e-4, 1e-8, 1e-7)
OVERHEADS = Overheads(0.001, 0.002, 0.003, 0.0005, 0.004, 0.0005)
MODES: tuple[WaitMode, ...] = (Mode.PD, Mode.COLOCATED)


def service(prefill: int = 1, decode: int = 1, num_blocks: int = 500, **more: object) -> PlannedService:
    workers = [
        PlannedWorker(f"{role}-{number}", role, "host", STEPS, num_blocks, 256, 16)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for number in range(count)
    ]
    settings = {"overheads": OVERHEADS, "layer_groups": 4, **more}
    return PlannedService(workers, LAYOUT, LinkClass(1e9, 1e-4), **settings)  # type: ignore[arg-type]


def requests(count: int, rate: float, seed: int = 0) -> Iterator[PlannedRequests]:
    draw, at_s = random.Random(seed), 0.0
    for _ in range(count):
        at_s += draw.expovariate(rate)
        turn = PlannedTurn((0,) * draw.randrange(1, 700), draw.randrange(1, 40))
        yield PlannedRequests(at_s, (turn,))


def test_an_idle_request_takes_what_its_parts_take() -> None:
    [done] = run_service(service(), Mode.PD, [PlannedRequests(0.0, (PlannedTurn((0,) * 300, 3),))]).requests
    chunks = [StepShape.plain(1, 256, 0)._replace(sampled=0), StepShape.plain(1, 44, 256)]
    prefill_s = sum(STEPS.seconds(chunk) for chunk in chunks) + OVERHEADS.between_s
    assert done.ttft_s == pytest.approx(
        OVERHEADS.arrive_s + OVERHEADS.dispatch_s + prefill_s + OVERHEADS.answer_s, abs=1e-6
    )
    # The last group of layers, of the blocks of the last chunk, is sent after the prefill.
    assert done.kv_blocks == 19
    assert OVERHEADS.handoff_s < done.exposed_s < OVERHEADS.handoff_s + 3 * LAYOUT.block_bytes / 1e9 + 1e-3
    decode_s = STEPS.seconds(StepShape.plain(1, 1, 300))
    assert done.ttft_decode_s - done.ttft_s == pytest.approx(done.exposed_s + decode_s, abs=1e-6)
    assert done.itl_s[1] == pytest.approx(STEPS.seconds(StepShape.plain(1, 1, 301)) + OVERHEADS.between_s, abs=1e-6)


def test_steps_without_prompts_take_times_of_the_spread() -> None:
    asked = [PlannedRequests(0.0, (PlannedTurn((0,) * 300, 30),))]
    plain = service()
    spread = replace(plain, workers=[replace(worker, spread=(0.5, 1.5)) for worker in plain.workers])
    ([same], [found]) = (run_service(each, Mode.PD, asked).requests for each in (plain, spread))
    assert found.ttft_s == same.ttft_s
    ratios = [
        (gap - OVERHEADS.between_s) / STEPS.seconds(StepShape.plain(1, 1, 301 + number))
        for number, gap in enumerate(found.itl_s[1:])
    ]
    assert {round(ratio, 6) for ratio in ratios} == {0.5, 1.5}


@pytest.mark.parametrize("mode", MODES)
def test_all_requests_end_with_the_blocks_of_the_arithmetic(mode: WaitMode, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[planned._Worker] = []
    init = planned._Worker.__init__

    def noted(self: planned._Worker, *given: object) -> None:
        init(self, *given)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(planned._Worker, "__init__", noted)
    sent = list(requests(200, 12.0))
    run = run_service(service(2, 2, 120), mode, sent)
    assert len(run.requests) == 200
    assert not [each.error for each in run.requests if each.error]
    by_sending = sorted(run.requests, key=lambda each: each.sent_s)
    for done, asked in zip(by_sending, sent, strict=True):
        tokens, outputs = len(asked.turns[0].token_ids), asked.turns[0].output_len
        assert (done.prompt_tokens, done.output_tokens, len(done.itl_s)) == (tokens, outputs, outputs - 1)
        assert done.kv_blocks == (-(-tokens // 16) if mode is Mode.PD and outputs > 1 else 0)
    for worker in made:
        assert worker.engine.scheduler.blocks.free_blocks == 120
        assert not worker.engine.scheduler._seqs


def figures(run: ServiceRun) -> list[tuple[float, float]]:
    return [(done.ttft_s, done.e2e_s) for done in run.requests]


def test_equal_seeds_give_equal_runs() -> None:
    runs = [run_service(service(2, 2), Mode.PD, requests(50, 8.0), seed) for seed in (1, 1)]
    assert figures(runs[0]) == figures(runs[1])


def test_a_slower_link_exposes_more_and_a_shared_one_is_shared() -> None:
    sent = [PlannedRequests(0.0, (PlannedTurn((0,) * 600, 2),)) for _ in range(2)]
    fast, slow = (run_service(service(2, 2, shared=LinkClass(rate, 0.01)), Mode.PD, sent) for rate in (1e9, 1e7))
    assert max(done.exposed_s for done in fast.requests) < min(done.exposed_s for done in slow.requests)
    num_bytes = sum(done.kv_blocks for done in slow.requests) * LAYOUT.block_bytes
    last_s = max(done.ttft_s + done.exposed_s for done in slow.requests)
    assert last_s > num_bytes / 1e7  # both go over one link
    assert slow.links["shared"] == pytest.approx(num_bytes / 1e7 / slow.duration_s, rel=1e-6)


def test_what_a_link_takes_of_the_devices_lengthens_their_steps() -> None:
    def means(**rates: float) -> tuple[float, float]:
        link = LinkClass(1e9, 1e-4, **rates)
        run = run_service(replace(service(), within=link), Mode.PD, list(requests(40, rate=5.0)))
        gaps = [gap for each in run.requests for gap in each.itl_s[1:]]
        return statistics.fmean(each.ttft_s for each in run.requests), statistics.fmean(gaps)

    ttft_s, gap_s = means()
    assert means(sender_bytes_per_s=1e12, receiver_bytes_per_s=1e12) == pytest.approx((ttft_s, gap_s), rel=1e-3)
    slow_ttft_s, same_gap_s = means(sender_bytes_per_s=2e7)
    assert slow_ttft_s > 1.1 * ttft_s
    same_ttft_s, slow_gap_s = means(receiver_bytes_per_s=2e7)
    assert slow_gap_s > 1.1 * gap_s
    assert (same_ttft_s, same_gap_s) == pytest.approx((ttft_s, gap_s), rel=0.05)


def test_turns_of_a_conversation_find_their_prefix_in_the_cache() -> None:
    turns = (PlannedTurn((5,) * 320, 8), PlannedTurn((6,) * 16, 8, 0.1))
    cached, plain = (
        run_service(service(prefix_caching=on), Mode.PD, [PlannedRequests(0.0, turns)]).requests for on in (True, False)
    )
    assert [done.prompt_tokens for done in cached] == [320, 344]
    assert cached[1].ttft_s < plain[1].ttft_s / 2
    assert cached[1].kv_blocks < plain[1].kv_blocks


def test_a_full_queue_refuses() -> None:
    router = RouterConfig(max_queue=2)
    run = run_service(service(1, 1, router=router), Mode.PD, requests(60, 1e4))
    refused = [done for done in run.requests if done.error]
    assert {done.error for done in refused} == {"CapacityExceeded"}
    assert 0 < len(refused) < 60


# --- the decisions of the real engine --------------------------------------------------------------------------------

Parts = list[tuple[str, int, int, tuple[int, ...], bool]]


def parts_of(seqs: Sequence[ScheduledSeq]) -> Parts:
    return [(seq.attempt_id, seq.start, len(seq.token_ids), tuple(seq.block_ids), seq.sample) for seq in seqs]


class Recorded(PlannedEngine):
    """Notes its steps, and what it calls of its core."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self.steps: list[Parts] = []
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        for name in ("take", "begin", "finish"):
            setattr(self._core, name, partial(self._call, name, getattr(self._core, name)))

    def _call(self, name: str, call: Callable[..., object], *given: object) -> object:
        self.calls.append((name, given))
        return call(*given)

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        self.steps.append(parts_of(seqs))
        return super().launch(seqs, hook)


class Answers(Outbox):
    """Answers an engine's hand-offs after a while, as its peers do."""

    engine: Recorded

    def __init__(self, loop: WorldLoop, draw: random.Random) -> None:
        super().__init__()
        self._loop, self._draw = loop, draw

    def send_kv(self, *events: KVEvent) -> None:
        for event in events:
            if isinstance(event, Reserved):
                self._answer(KVReady(event.attempt_id, 7))
            elif isinstance(event, Computed):
                for progress in event.progress:
                    if progress.first_token is not None:
                        self._answer(Release(progress.attempt_id))

    def _answer(self, command: CoreCommand) -> None:
        self._loop.call_later(self._draw.uniform(0.0, 0.3), self.engine.take, command)


class Compared:
    """A real runner that notes its steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.steps = runner, list[Parts]()

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        self.steps.append(parts_of(seqs))
        return self._runner.launch(seqs, hook)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_the_real_engine(tmp_path: Path, seed: int, run_ahead: bool) -> None:
    """On a trace of requests, hand-offs and releases over a pool so small that requests are preempted: the simulated
    engine and one that computes a model get the same commands between the same steps, and schedule the same parts with
    the same blocks."""
    draw, num_blocks = random.Random(f"decisions/{seed}"), 20
    config = SchedulerConfig(24, 6, 200, BLOCK, num_blocks, prefix_caching=False)
    world = World(random.Random(seed), lambda context: pytest.fail(str(context)), 0.0)
    loop = WorldLoop(world, "engine")  # type: ignore[abstract]
    layout = KVLayout.uniform("planned", "float32", BLOCK, 2, 1, 8)
    answers = Answers(loop, draw)
    engine = answers.engine = Recorded(loop, config, STEPS, answers, layout, run_ahead=run_ahead)
    at_s = 0.0
    for number in range(24):
        at_s += draw.expovariate(20.0)
        role, name = draw.choice(list(KVRole)), str(number)
        tokens = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 60))]
        asked = submit(name, role, tokens, draw.randrange(2, 60), ignore_eos=True)
        loop.call_later(at_s, engine.take, asked)
    loop.call_later(100.0, lambda: None)  # so that the world does not end before
    world.run(lambda: world.now() > 1060.0, float("inf"))
    assert engine.scheduler.blocks.free_blocks == num_blocks
    assert engine.scheduler.load().preemptions

    runner = Compared(make_runner(save_random_model(tmp_path, "gqa"), num_blocks))
    clock = FakeClock()
    core = EngineCore(Scheduler(config, clock, KVConnector(clock)), runner, clock, Outbox(), run_ahead)
    for name, given in engine.calls:
        getattr(core, name)(*given)
    assert runner.steps == engine.steps


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["prefill-0", "decode-1"])
def test_requests_of_a_lost_worker_go_on_elsewhere(lost: str) -> None:
    asked = list(requests(120, 40.0))
    calm = run_service(service(2, 2), Mode.PD, asked)
    run = run_service(service(2, 2, failures=[Failure(lost, 1.5)]), Mode.PD, asked)
    assert not any(each.error for each in run.requests)
    assert [each.output_tokens for each in _sent(run)] == [each.output_tokens for each in _sent(calm)]
    assert [each.prompt_tokens for each in _sent(run)] == [each.prompt_tokens for each in _sent(calm)]
    again = [each for each in run.requests if each.attempts > 1]
    assert 0 < len(again) < 60
    lost_s = BEGIN_S + 1.5
    assert all(each.sent_s < lost_s < each.sent_s + each.e2e_s for each in again)
    before = [each for each in _sent(run) if each.sent_s + each.e2e_s < lost_s]
    assert before == [each for each in _sent(calm) if each.sent_s + each.e2e_s < lost_s], "nothing else changes"
    use = {each.worker_id: each.busy for each in run.workers}
    other = {"prefill-0": "prefill-1", "decode-1": "decode-0"}[lost]
    assert use[lost] < 0.75 * use[other]


def test_a_worker_that_comes_back_serves_again() -> None:
    asked = list(requests(120, 20.0))
    gone, back = (
        run_service(service(1, 2, failures=[Failure("decode-0", 1.0, for_s)]), Mode.PD, asked)
        for for_s in (math.inf, 1.5)
    )
    steps = [{each.worker_id: each.steps for each in run.workers}["decode-0"] for run in (gone, back)]
    assert steps[1] > 2 * steps[0] > 0
    assert not any(each.error for each in (*gone.requests, *back.requests))


def test_without_a_worker_of_a_role_the_others_serve_alone() -> None:
    run = run_service(service(1, 1, failures=[Failure("prefill-0", 1.0)]), Mode.AUTO, requests(40, 20.0))
    assert not any(each.error for each in run.requests)
    late = [each for each in run.requests if each.sent_s > BEGIN_S + 1.0]
    assert late
    assert all(each.kv_blocks == 0 for each in late)


@pytest.mark.parametrize("seed", range(20))
def test_after_failures_no_block_is_held(seed: int) -> None:
    draw = random.Random(seed)
    failures = [
        Failure(f"{draw.choice(['prefill', 'decode'])}-{draw.randrange(2)}", draw.uniform(0.05, 3.0), 0.3)
        for _ in range(6)
    ]
    simulation = planned._Simulation(
        service(2, 2, num_blocks=120, failures=failures), Mode.AUTO, iter(list(requests(60, 25.0, seed))), seed
    )
    run = simulation.run()
    assert not any(each.error for each in run.requests)
    assert len(run.requests) == 60
    simulation.world.run(lambda: False, simulation.world.now_s + 5.0)
    for worker in simulation.workers.values():
        assert worker.engine.scheduler.blocks.free_blocks == 120
    for registered in simulation.registry.workers:
        assert registered.outstanding_requests == 0


def _sent(run: ServiceRun) -> list[RequestResult]:
    """The requests in the order of their sending."""
    return sorted(run.requests, key=lambda each: each.sent_s)
