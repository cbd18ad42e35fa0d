"""The engine's model runner without its process, driven as the scheduler drives it."""

from __future__ import annotations

import os
import statistics
import time
import timeit
from collections.abc import Sequence
from functools import partial

import torch

from contract.engine import Ready
from engine.process.build import build_engine
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.sequence import PromptLogprobs
from engine.spec import DEFAULT_BLOCK_SIZE, EngineSpec
from experiments.engine_alone.guessing import Guessing
from experiments.engine_alone.steps import STEPS, WARM_STEPS, StepCase
from pdserve.core.config import EngineConfig
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from runtime import memory_file
from runtime.cuda import Cuda

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
        draft_model: str = "",
    ) -> None:
        spec = EngineSpec(
            model=model,
            dtype=dtype,
            device=device,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk or EngineConfig().token_budget(device, Role.PREFILL),
            draft_model=draft_model,
        )
        fd = memory_file.create("bare-engine")
        try:
            built = build_engine(spec, fd)
        finally:
            os.close(fd)
        self._runner, self._drafter = built.runner, built.drafter
        self._cuda = None if device == "cpu" else Cuda()
        self.ready: Ready = built.ready
        self._config = built.scheduler_config
        self.chunk = self._config.max_num_batched_tokens

    def measure_s(self, case: StepCase) -> float:
        """Seconds of a case now: of a decode step the median of several, of a whole prompt that of all its steps."""
        if case.kind == "prompt":
            return self.generate(self._random(case.tokens), 1)[1][0]
        warm, steps = (WARM_STEPS, STEPS) if case.kind == "decode" else (0, 2)
        return statistics.median(self.steps_s(case, steps, warm))

    def steps_s(self, case: StepCase, steps: int, warm: int = 0, sampling: SamplingParams = _GREEDY) -> list[float]:
        """Seconds of each of ``steps`` steps of a case, after ``warm`` others; on a GPU of decode steps their mean.
        Requests that decode have one more token in their context with each step."""
        if self._cuda is not None and case.kind == "decode":
            return [self._decode_on_gpu_s(self._cuda, case, steps, warm, sampling)]
        grows = case.kind == "decode"
        tables = block_tables(case.batch + case.beside, case.context + max(case.tokens, warm + steps))
        times = []
        for step in range(warm + steps):
            tokens = [1] * case.beside + [case.tokens] * case.batch
            parts = self._parts(tokens, case.context + step * grows, tables, sampling)
            times.append(timeit.timeit(partial(self._runner.execute, parts), number=1))
        return times[warm:]

    def _decode_on_gpu_s(self, cuda: Cuda, case: StepCase, steps: int, warm: int, sampling: SamplingParams) -> float:
        """Seconds of a decode step by the GPU's clock. It is given all steps at once, as by an engine that runs ahead,
        so that nothing waits for the host."""
        tables = block_tables(case.batch, case.context + warm + steps)
        planned = [self._parts([1] * case.batch, case.context + step, tables, sampling) for step in range(warm + steps)]
        for parts in planned[:warm]:
            self._runner.execute(parts)
        began, running = cuda.record(0, timed=True), []
        for parts in planned[warm:]:
            running.append(self._runner.launch(parts))
            running[-1].sample()
        ended = cuda.record(0, timed=True)
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / steps

    def _parts(
        self, tokens: Sequence[int], start: int, tables: Sequence[list[int]], sampling: SamplingParams
    ) -> list[ScheduledSeq]:
        return [
            ScheduledSeq(str(i), self._random(count), start, table, True, sampling)
            for i, (count, table) in enumerate(zip(tokens, tables, strict=True))
        ]

    def generate(self, prompt: Sequence[int], tokens: int, *, cached: bool = True) -> tuple[list[int], list[float]]:
        """The greedy continuation of ``prompt``, and the seconds that each of its tokens took: the first the prefill
        in steps of ``chunk``, the others a decode step each. Not ``cached``: without keys and values of earlier steps,
        each token is the first token of the whole sequence before it."""
        times: list[float] = []
        ids = list(prompt)
        [table] = block_tables(1, len(prompt) + tokens)
        for number in range(tokens):
            started_s = time.perf_counter()
            for start in range(len(ids) - 1 if cached and number else 0, len(ids), self.chunk):
                end = min(len(ids), start + self.chunk)
                part = ScheduledSeq("one", ids[start:end], start, table, end == len(ids), _GREEDY)
                drawn = self._runner.execute([part])
            times.append(time.perf_counter() - started_s)
            ids.append(drawn["one"][0].token_id)
        return ids[len(prompt) :], times

    def guessing(self, prompt_len: int, output_len: int) -> Guessing:
        """What measures guesses of next tokens, in outputs of ``output_len`` after prompts of ``prompt_len``."""
        return Guessing(self._runner, self._config, self._drafter, self.ready.vocab_size, prompt_len, output_len)

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """The log-probability of each token of ``prompt`` after the first, in steps of ``chunk``."""
        [table], told = block_tables(1, len(prompt)), PromptLogprobs(prompt, 0)
        for start in range(0, len(prompt), self.chunk):
            part = list(prompt[start : start + self.chunk])
            self._runner.execute([ScheduledSeq("one", part, start, table, False, _GREEDY, prompt_logprobs=told)])
        return [each.logprob for each in told.values]

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
