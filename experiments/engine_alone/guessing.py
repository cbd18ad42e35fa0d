"""The rate of requests whose next tokens are guessed, on a bare engine."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contract.engine import EngineEvent, KVEvent, KVRole, Step, Submit
from engine.core import EngineCore
from engine.model.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.scheduling.speculation import DraftContext, Drafter, NgramDrafter
from experiments.engine_alone.steps import OFF, REPEATING, SPECULATION, GuessCase
from pdserve.core.clock import MonotonicClock
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams

_REPEATED = 16
"""Tokens of a prompt that repeats, again and again."""


class PlantedDrafter(Drafter):
    """Knows all tokens of requests, by their ids, and guesses each with probability ``right``, else another one."""

    def __init__(self, texts: Mapping[str, Sequence[int]], right: float, vocab_size: int) -> None:
        self._texts, self._right, self._vocab_size = texts, right, vocab_size
        self._draw = random.Random(vocab_size)

    def prepare(self, contexts: Sequence[DraftContext], budget: int) -> list[int]:
        """See `Drafter`."""
        return [len(guess) for guess in map(self._next, contexts)]

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`."""
        return [
            [
                token_id if self._draw.random() < self._right else (token_id + 1) % self._vocab_size
                for token_id in self._next(context)
            ]
            for context in contexts
        ]

    def _next(self, context: DraftContext) -> Sequence[int]:
        end = len(context.token_ids)
        return self._texts[context.attempt_id][end : end + context.most]


class _Answers:
    """Keeps the tokens of requests, by their ids."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.count = 0

    def send(self, *events: EngineEvent) -> None:
        """Note tokens."""
        for event in events:
            for token in event.tokens if isinstance(event, Step) else ():
                self.token_ids.setdefault(token.attempt_id, []).append(token.token_id)
                self.count += 1

    def send_kv(self, *events: KVEvent) -> None:
        """There are none."""


class _Served(NamedTuple):
    rate: float
    texts: Mapping[str, list[int]]  # prompts and answers
    drafts: int
    accepted: int


class Guessing:
    """Measures cases with a ``runner``, whose prompts have ``prompt_len`` tokens and whose outputs ``output_len``."""

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        draft_model: Drafter | None,
        vocab_size: int,
        prompt_len: int,
        output_len: int,
    ) -> None:
        self._runner, self._config, self._draft_model, self._vocab_size = runner, config, draft_model, vocab_size
        self._prompt_len, self._output_len = prompt_len, output_len

    def measure(self, case: GuessCase, arms: Sequence[str], seed: str) -> dict[str, dict[str, Any]]:
        """By arm: output tokens per second after the first of each request, and the drafts and accepted drafts."""
        texts = {} if case.right is None else self._serve(case, OFF, None, seed).texts
        each = {arm: self._serve(case, arm, None if arm == OFF else self._drafter(case, texts), seed) for arm in arms}
        return {
            arm: {"rate": served.rate, "drafts": served.drafts, "accepted": served.accepted}
            for arm, served in each.items()
        }

    def _drafter(self, case: GuessCase, texts: Mapping[str, Sequence[int]]) -> Drafter | None:
        """What guesses in a case: from the ``texts`` if its guesses are planted."""
        if case.right is not None:
            return PlantedDrafter(texts, case.right, self._vocab_size)
        return self._draft_model if case.by_model else NgramDrafter()

    def _serve(self, case: GuessCase, arm: str, drafter: Drafter | None, seed: str) -> _Served:
        clock, answers, draw = MonotonicClock(), _Answers(), random.Random(seed)
        scheduler = Scheduler(self._config, clock, None, drafter)
        core = EngineCore(scheduler, self._runner, clock, answers)
        sampling = SamplingParams(
            max_tokens=self._output_len,
            temperature=0.0 if case.right is not None or case.text == REPEATING else 1.0,
            seed=draw.getrandbits(32),
            ignore_eos=True,
            speculation=SPECULATION[arm],
        )
        texts: dict[str, list[int]] = {}
        for number in range(case.batch):
            prompt = [draw.randrange(self._vocab_size) for _ in range(self._prompt_len)]
            if case.text == REPEATING:
                prompt = (prompt[:_REPEATED] * self._prompt_len)[: self._prompt_len]
            request = Request(str(number), tuple(prompt), sampling, attempt_id=str(number), salt=seed + arm)
            core.take(Submit(request, KVRole.LOCAL))
            texts[str(number)] = prompt
        while len(answers.token_ids) < case.batch:
            core.step()
        began_s, before = time.perf_counter(), answers.count
        while core.step():
            pass
        rate = (answers.count - before) / (time.perf_counter() - began_s)
        load = scheduler.load()
        texts = {attempt_id: prompt + answers.token_ids[attempt_id] for attempt_id, prompt in texts.items()}
        return _Served(rate, texts, load.draft_tokens, load.accepted_draft_tokens)
