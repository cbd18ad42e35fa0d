"""The engine's model runner without its process, driven as the scheduler drives it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

import torch

from contract.engine import Ready
from engine.process.build import build_engine
from engine.scheduling.batch import ScheduledSeq
from engine.spec import DEFAULT_BLOCK_SIZE, EngineSpec
from experiments.engine_alone.steps import STEPS, WARM_STEPS, StepCase
from pdserve.core.config import EngineConfig
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from runtime import memory_file

BLOCK_SIZE = DEFAULT_BLOCK_SIZE
_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_TOKEN_IDS = 1000


class BareEngine:
    """An engine in this process, with one thread. ``ready`` is what it says of itself; ``chunk`` are the tokens of a
    prompt that one step computes (default: a prefill worker's budget). Raises what `engine.process.build.build_engine`
    raises."""

    def __init__(
        self,
        model: str,
        device: str,
        *,
        num_blocks: int,
        dtype: str = "auto",
        max_num_seqs: int = 64,
        chunk: int | None = None,
    ) -> None:
        spec = EngineSpec(
            model=model,
            dtype=dtype,
            device=device,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk or EngineConfig().token_budget(device, Role.PREFILL),
        )
        fd = memory_file.create("bare-engine")
        try:
            built = build_engine(spec, fd)
        finally:
            os.close(fd)
        self._runner = built.runner
        self.ready: Ready = built.ready
        self.chunk = built.scheduler_config.max_num_batched_tokens

    def measure_s(self, case: StepCase) -> float:
        """Seconds of a case now: of a decode step the median of several, of a whole prompt that of all its steps."""
        if case.kind == "prompt":
            return self.prefill_s(case.tokens)
        warm, steps = (WARM_STEPS, STEPS) if case.kind == "decode" else (0, 2)
        return statistics.median(self.steps_s(case, steps, warm))

    def prefill_s(self, tokens: int) -> float:
        """Seconds for the first token of a random prompt of ``tokens``, in steps of ``chunk``."""
        return self._first_token(self._random(tokens))[1]

    def steps_s(self, case: StepCase, steps: int, warm: int = 0, sampling: SamplingParams = _GREEDY) -> list[float]:
        """Seconds of each of ``steps`` steps of a case, after ``warm`` others. Requests that decode have one more token
        in their context with each step."""
        grows = case.kind == "decode"
        tables = block_tables(case.batch + case.beside, case.context + max(case.tokens, warm + steps))
        times = []
        for step in range(warm + steps):
            start = case.context + step * grows
            tokens = [1] * case.beside + [case.tokens] * case.batch
            parts = [
                ScheduledSeq(str(i), self._random(count), start, table, True, sampling)
                for i, (count, table) in enumerate(zip(tokens, tables, strict=True))
            ]
            started_s = time.perf_counter()
            self._runner.execute(parts)
            times.append(time.perf_counter() - started_s)
        return times[warm:]

    def generate(self, prompt: Sequence[int], tokens: int, *, cached: bool = True) -> tuple[list[int], list[float]]:
        """The greedy continuation of ``prompt``, and the seconds that each of its tokens took: the first the prefill,
        the others a decode step each. Not ``cached``: without keys and values of earlier steps, each token is the first
        token of the whole sequence before it."""
        token_ids: list[int] = []
        times: list[float] = []
        [table] = block_tables(1, len(prompt) + tokens)
        for number in range(tokens):
            if cached and number:
                part = ScheduledSeq("one", token_ids[-1:], len(prompt) + number - 1, table, True, _GREEDY)
                started_s = time.perf_counter()
                token_id = self._runner.execute([part])["one"].token_id
                step_s = time.perf_counter() - started_s
            else:
                token_id, step_s = self._first_token([*prompt, *token_ids])
            token_ids.append(token_id)
            times.append(step_s)
        return token_ids, times

    def _first_token(self, prompt: Sequence[int]) -> tuple[int, float]:
        """Compute a whole prompt in steps of ``chunk``; the token after it, and the seconds."""
        [table] = block_tables(1, len(prompt))
        started_s = time.perf_counter()
        for start in range(0, len(prompt), self.chunk):
            end = min(len(prompt), start + self.chunk)
            part = ScheduledSeq("prompt", list(prompt[start:end]), start, table, end == len(prompt), _GREEDY)
            drawn = self._runner.execute([part])
        return drawn["prompt"].token_id, time.perf_counter() - started_s

    def _random(self, tokens: int) -> list[int]:
        drawn: list[int] = torch.randint(0, min(_TOKEN_IDS, self.ready.vocab_size), (tokens,)).tolist()
        return drawn


def blocks_for(count: int, tokens: int) -> int:
    """Blocks of ``count`` requests of ``tokens`` each."""
    return count * -(-tokens // BLOCK_SIZE)


def blocks_of(cases: Sequence[StepCase]) -> int:
    """Blocks that suffice for each of the cases."""
    return max(
        (blocks_for(c.batch + c.beside, c.context + max(c.tokens, WARM_STEPS + STEPS)) for c in cases), default=0
    )


def block_tables(count: int, tokens: int) -> list[list[int]]:
    """Block tables of ``count`` requests whose blocks are interleaved, as blocks are that were taken one by one."""
    blocks = blocks_for(1, tokens)
    return [list(range(i, count * blocks, count)) for i in range(count)]
