"""Steps that are launched before the tokens of the one before are known: the same tokens, in the right order of calls,
and nothing waits for the device in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contract.engine import Computed, EngineEvent, KVEvent, KVRole, Progress, Step
from engine.core import EngineCore, RunningStep, Sampled
from engine.model.runner import ModelRunner
from engine.scheduling.batch import PENDING, LayerHook, SampledToken, ScheduledSeq
from engine.scheduling.kv_connector import KVConnector
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import FakeClock, MonotonicClock
from tests.engine.harness import BLOCK, Outbox, make_core, make_runner, submit
from tests.random_models import save_random_model
from tests.strict_cuda import StrictGpus


@dataclass
class Recorder:
    """Notes the calls to a runner, and plays a device that takes a second for each step."""

    clock: FakeClock
    calls: list[str] = field(default_factory=list)
    free_s: float = 0.0  # when the device has computed what it was given

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        """Note it. `PENDING` follows a step that has been sampled."""
        number = sum(call.startswith("launch") for call in self.calls)
        if any(seq.token_ids[-1] == PENDING for seq in seqs):
            assert f"sample {number - 1}" in self.calls
        self.calls.append(f"launch {number}")
        self.free_s = max(self.free_s, self.clock.now()) + 1.0
        return RecordedStep(self, number, seqs, self.free_s)


@dataclass
class RecordedStep:
    """A step of `Recorder`."""

    recorder: Recorder
    number: int
    seqs: Sequence[ScheduledSeq]
    done_s: float
    sampled: bool = False

    def sample(self) -> None:
        """Note it, once."""
        if not self.sampled:
            self.recorder.calls.append(f"sample {self.number}")
        self.sampled = True

    def tokens(self) -> Sampled:
        """Wait for the device."""
        self.recorder.calls.append(f"tokens {self.number}")
        clock = self.recorder.clock
        clock.advance(max(0.0, self.done_s - clock.now()))
        return {seq.attempt_id: [SampledToken(1)] for seq in self.seqs if seq.sample}


class Telling(KVConnector):
    """A connector that announces the first layer of each step, by the step's number."""

    num_steps = 0

    def layer_hook(self, parts: Any, send: Any) -> LayerHook | None:
        """A hook."""
        number, self.num_steps = self.num_steps, self.num_steps + 1
        return LayerHook(frozenset({1}), lambda n: send(Computed([Progress(f"step {number}", 0, [], n)])))


def record(max_tokens: int, run_ahead: bool, connector: KVConnector | None = None) -> tuple[list[str], Outbox]:
    clock, outbox = FakeClock(), Outbox()
    recorder = Recorder(clock)
    scheduler = Scheduler(SchedulerConfig(64, 4, 64, 8, 32), clock, connector)
    core = EngineCore(scheduler, recorder, clock, outbox, run_ahead)
    core.take(submit("a", KVRole.LOCAL, [1, 2, 3], max_tokens))
    while core.step():
        pass
    return recorder.calls, outbox


def test_the_order_of_calls() -> None:
    ahead, _ = record(3, run_ahead=True)
    assert ahead == [
        *("launch 0", "sample 0"),
        *("launch 1", "tokens 0", "sample 1"),
        *("launch 2", "tokens 1", "sample 2"),
        "tokens 2",
    ]
    now, _ = record(3, run_ahead=False)
    assert now == [f"{call} {n}" for n in range(3) for call in ("launch", "sample", "tokens")]
    telling, _ = record(3, run_ahead=True, connector=Telling(FakeClock()))
    assert telling == ahead, "announcing layers does not wait for them"


def test_layers_are_announced_after_the_end_of_the_step_before() -> None:
    """Although they are launched, and may have been computed, earlier."""

    class Hasty(Recorder):
        def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
            assert hook is not None
            hook.done(1)
            return super().launch(seqs, hook)

    class Listening(Outbox):
        def send(self, *events: EngineEvent) -> None:
            order.extend("end" for event in events if isinstance(event, Step))

        def send_kv(self, *events: KVEvent) -> None:
            order.extend(each.attempt_id for event in events if isinstance(event, Computed) for each in event.progress)

    clock, order = FakeClock(), []  # type: tuple[FakeClock, list[str]]
    scheduler = Scheduler(SchedulerConfig(64, 4, 64, 8, 32), clock, Telling(clock))
    core = EngineCore(scheduler, Hasty(clock), clock, Listening(), True)
    core.take(submit("a", KVRole.LOCAL, [1, 2, 3], 3))
    while core.step():
        pass
    assert order == ["step 0", "end", "step 1", "end", "step 2", "end"]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_times_are_those_of_the_device(run_ahead: bool) -> None:
    """A step that was launched early has not started early, so that its time and that before it are not confused."""
    _, outbox = record(4, run_ahead)
    assert [(step.step_started_s, step.sampled_s) for step in outbox.steps] == [(n, n + 1.0) for n in range(4)]
    assert {token.first_scheduled_s for token in outbox.tokens["a"]} == {0.0}


def test_a_request_that_comes_late_starts_when_the_device_does() -> None:
    clock, outbox = FakeClock(), Outbox()
    core = EngineCore(Scheduler(SchedulerConfig(64, 4, 64, 8, 32), clock), Recorder(clock), clock, outbox, True)
    core.take(submit("a", KVRole.LOCAL, [1], 6))
    core.step()
    core.step()
    core.take(submit("late", KVRole.LOCAL, [2], 2))  # at 1.0; the step until 2.0 has been launched
    while core.step():
        pass
    assert clock.now() == 6.0
    first = outbox.tokens["late"][0]
    assert (first.first_scheduled_s, outbox.steps[2].tokens) == (2.0, [*outbox.steps[2].tokens])
    assert first in outbox.steps[2].tokens


def test_nothing_waits_for_a_gpu_between_two_launches(tmp_path: Path) -> None:
    """Over the stand-in for CUDA, with steps of chunks and of decodes."""
    cuda = StrictGpus().process()
    cuda.init(0)
    plain = make_runner(save_random_model(tmp_path, "gqa"))
    runner = ModelRunner(plain._model, plain._attention, plain.pool, cuda=cuda)

    class Noting:
        def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
            cuda.calls.append("launch")
            return runner.launch(seqs, hook)

    scheduler = Scheduler(SchedulerConfig(16, 4, 128, BLOCK, 64), MonotonicClock(), Telling(FakeClock()))
    core, outbox = make_core(Noting(), scheduler, run_ahead=True)
    core.take(submit("a", KVRole.LOCAL, range(40), 8))
    core.take(submit("b", KVRole.LOCAL, [7, 8, 9], 8))
    while core.step():
        pass
    calls = [call for call in cuda.calls if call != "init"]
    copied, waited = "results are copied to the host", "a copy is waited for"
    assert calls.count("launch") == calls.count(copied) == calls.count(waited)
    launched = done = 0
    for call in calls:
        launched += call == "launch"
        if call == waited:
            done += 1
            last = done == calls.count(waited)
            assert launched == done + (not last), "a step was waited for before the next one was launched"
    assert {name: len(tokens) for name, tokens in outbox.tokens.items()} == {"a": 8, "b": 8}
    announced = [each.attempt_id for event in outbox.kv_events for each in event.progress]  # type: ignore[union-attr]
    assert announced == [f"step {number}" for number in range(calls.count("launch"))]
    assert "an event is waited for" not in calls
