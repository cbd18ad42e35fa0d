"""A step that runs out of memory: its requests go on in smaller steps, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from contract.engine import KVRole
from engine.core import CALM_STEPS, RunningStep, Sampled
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner
from engine.scheduling.batch import LayerHook, ScheduledSeq, StepTooLarge
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import MonotonicClock
from tests.engine.harness import BLOCK, GREEDY, Outbox, make_core, make_runner, submit
from tests.random_models import save_random_model
from tests.strict_cuda import StrictGpus

PROMPTS = {"a": list(range(40)), "b": list(range(7, 70)), "c": [5]}
BUDGET = 64


def size_of(seqs: Sequence[ScheduledSeq]) -> int:
    """Tokens of a step."""
    return sum(len(seq.token_ids) for seq in seqs)


@dataclass
class Small:
    """A runner on a device without memory for steps that ``fails`` names. ``when`` says in which call."""

    runner: ModelRunner
    fails: Callable[[Sequence[ScheduledSeq]], bool]
    when: str = "launch"
    sizes: list[int] = field(default_factory=list)

    def launch(self, seqs: Sequence[ScheduledSeq], hook: LayerHook | None) -> RunningStep:
        """See `engine.core.Runner`."""
        if self.when == "launch" and self.fails(seqs):
            raise StepTooLarge("CUDA out of memory")
        self.sizes.append(size_of(seqs))
        return SmallStep(self, self.runner.launch(seqs, hook), seqs)


@dataclass
class SmallStep:
    """A step of `Small`."""

    small: Small
    step: RunningStep
    seqs: Sequence[ScheduledSeq]

    def sample(self) -> None:
        """See `engine.core.RunningStep`."""
        if self.small.when == "sample" and self.small.fails(self.seqs):
            raise StepTooLarge("CUDA out of memory")
        self.step.sample()

    def tokens(self) -> Sampled:
        """See `engine.core.RunningStep`."""
        return self.step.tokens()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(save_random_model(tmp_path_factory.mktemp("model"), "gqa"))


def run(small: Small, prompts: dict[str, list[int]], run_ahead: bool) -> Outbox:
    """Eight tokens of each."""
    scheduler = Scheduler(SchedulerConfig(BUDGET, 4, 256, BLOCK, 64, prefix_caching=False), MonotonicClock())
    core, outbox = make_core(small, scheduler, run_ahead)
    for name, prompt in prompts.items():
        core.take(submit(name, KVRole.LOCAL, prompt, 8))
    for _ in range(2000):
        if not core.step():
            break
    assert not core.step(), "it ends"
    assert scheduler.blocks.free_blocks == scheduler.config.num_blocks
    return outbox


@pytest.mark.parametrize("when", ["launch", "sample"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_smaller_steps_give_the_same_tokens(runner: ModelRunner, run_ahead: bool, when: str) -> None:
    expected = run(Small(runner, lambda seqs: False), PROMPTS, run_ahead)
    small = Small(runner, lambda seqs: size_of(seqs) > 10, when)
    found = run(small, PROMPTS, run_ahead)
    assert found.token_ids == expected.token_ids
    assert not found.rejected
    assert when == "sample" or max(small.sizes) <= 10


def test_steps_become_larger_again_after_a_while(runner: ModelRunner) -> None:
    tight = True
    small = Small(runner, lambda seqs: tight and size_of(seqs) > 20)
    scheduler = Scheduler(SchedulerConfig(BUDGET, 4, 512, BLOCK, 64), MonotonicClock())
    core, _ = make_core(small, scheduler)
    core.take(submit("a", KVRole.LOCAL, PROMPTS["b"], 4 * CALM_STEPS))
    limits = []
    for _ in range(2):
        core.step()
        limits.append(scheduler.max_step_tokens)
    tight = False
    for _ in range(3):
        for _ in range(CALM_STEPS):
            core.step()
        limits.append(scheduler.max_step_tokens)
    assert limits == [31, 15, 30, 60, BUDGET]


@pytest.mark.parametrize("when", ["launch", "sample"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_that_never_fits_fails_alone(runner: ModelRunner, run_ahead: bool, when: str) -> None:
    expected = run(Small(runner, lambda seqs: False), {"a": PROMPTS["a"], "c": PROMPTS["c"]}, run_ahead)
    small = Small(runner, lambda seqs: any(seq.attempt_id == "b" for seq in seqs), when)
    found = run(small, PROMPTS, run_ahead)
    assert found.token_ids == expected.token_ids
    assert list(found.rejected) == ["b"]
    assert found.rejected["b"] == (
        "the device lacks memory for a step of 1 token (CUDA out of memory); lower engine.kv_memory_mb"
    )


@pytest.mark.parametrize("when", ["layers", "sampling"])
def test_memory_of_a_step_that_does_not_fit_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The error would keep its tensors, and what is cached is in pieces. Its layers are not announced."""
    cuda = StrictGpus().process()
    cuda.init(0)
    plain = make_runner(save_random_model(tmp_path, "gqa"))
    runner = ModelRunner(plain._model, plain._attention, plain.pool, cuda=cuda)
    announced: list[str] = []
    seqs = [ScheduledSeq("a", [1, 2, 3], 0, [0], True, GREEDY)]

    def fails(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patched:
        if when == "layers":
            patched.setattr(Decoder, "logits", fails)
        else:
            patched.setattr("engine.model.sampler.adjust", fails)
        with pytest.raises(StepTooLarge, match=r"Tried to allocate 2\.00 GiB") as failed:
            runner.launch(seqs, LayerHook(frozenset({1}), lambda number: announced.append("failed"))).sample()
    assert failed.value.__context__ is None
    assert cuda.calls[-1] == "cached memory is freed"
    step = runner.launch(seqs, LayerHook(frozenset({1}), lambda number: announced.append("again")))
    step.sample()
    assert step.tokens()
    assert announced == ["again"]
