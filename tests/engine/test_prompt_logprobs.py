"""Log-probabilities of prompts are those of transformers: in chunks, beside decodes, after a preemption, and of prompts
that the prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from contract.engine import KVRole, TokenOut
from engine.core import EngineCore
from engine.model import runner as runners
from engine.model.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import MonotonicClock
from tests.engine.harness import BLOCK, Outbox, make_runner, submit
from tests.random_models import save_random_model

POOL_BLOCKS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "gqa")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, POOL_BLOCKS)


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(307) for _ in range(length)]


def check(folder: Path, prompt: Sequence[int], token: TokenOut, num_top: int) -> None:
    """The first token of a request has the logprobs of its prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert len(token.prompt_logprobs) == len(prompt) - 1
    for told, token_id, row in zip(token.prompt_logprobs, prompt[1:], wanted, strict=False):
        assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [value for _, value in told.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert [float(row[top_id]) for top_id, _ in told.top] == pytest.approx([v for _, v in told.top], abs=1e-4)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("budget", [7, 64])
def test_in_chunks_beside_others(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, budget: int, run_ahead: bool
) -> None:
    monkeypatch.setattr(runners, "_LOGITS_BYTES", 4 * 307 * 5)  # five rows at a time
    outbox = Outbox()
    config = SchedulerConfig(budget, 8, 512, BLOCK, POOL_BLOCKS)
    core = EngineCore(Scheduler(config, MonotonicClock()), runner, MonotonicClock(), outbox, run_ahead)
    prompts = {name: prompt_of(length, length) for name, length in (("long", 45), ("short", 3), ("one", 1))}
    core.take(submit("plain", KVRole.LOCAL, prompts["long"], 9))  # its KV is cached from then on
    while "plain" not in outbox.tokens:
        core.step()
    for name, prompt in prompts.items():
        core.take(submit(name, KVRole.LOCAL, prompt, 4, prompt_logprobs=len(prompt) % 4))
    core.take(submit("resumed", KVRole.PUSH, prompts["long"], 4, outputs=[5, 6, 7], prompt_logprobs=2))
    core.take(submit("again", KVRole.LOCAL, prompts["long"], 4))
    while core.step():
        pass
    for name, prompt in prompts.items():
        first, *others = outbox.tokens[name]
        check(folder, prompt, first, len(prompt) % 4)
        assert first.cached_tokens == 0
        assert not any(token.prompt_logprobs for token in others)
    check(folder, prompts["long"], outbox.tokens["resumed"][0], 2)
    assert not outbox.tokens["again"][0].prompt_logprobs
    assert outbox.tokens["again"][0].cached_tokens == 40
    ids = {name: [token.token_id for token in outbox.tokens[name]] for name in ("plain", "long")}
    assert ids["plain"][:4] == ids["long"]


def test_after_a_preemption_within_the_prompt(folder: Path, runner: ModelRunner) -> None:
    outbox = Outbox()
    scheduler = Scheduler(SchedulerConfig(4, 8, 512, BLOCK, 9), MonotonicClock())
    core = EngineCore(scheduler, runner, MonotonicClock(), outbox)
    core.take(submit("first", KVRole.LOCAL, prompt_of(BLOCK - 1, 1), 14, priority=-1))
    prompt = prompt_of(7 * BLOCK - 2, 2)
    core.take(submit("told", KVRole.LOCAL, prompt, 2, prompt_logprobs=3))
    preempted_at: list[int] = []
    while core.step():
        if scheduler.load().preemptions and not preempted_at:
            preempted_at.append(len(outbox.tokens.get("told", ())))
    assert preempted_at == [0], "before its first token"
    check(folder, prompt, outbox.tokens["told"][0], 3)
