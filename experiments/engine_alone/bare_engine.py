"""The engine's model runner without its process, driven as the scheduler drives it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from engine.messages import Ready
from engine.process.build import build_engine
from engine.scheduling.batch import ScheduledSeq
from engine.spec import DEFAULT_BLOCK_SIZE, EngineSpec
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

    def prefill_s(self, tokens: int) -> float:
        """Seconds for the first token of a random prompt of ``tokens``."""
        return self._first_token(self._random(tokens))[1]

    def decode_steps_s(
        self, batch: int, context: int, warm_steps: int, steps: int, sampling: SamplingParams = _GREEDY
    ) -> list[float]:
        """Seconds of each of ``steps`` steps that make one token for each of ``batch`` requests, after ``warm_steps``
        others. The requests have ``context`` tokens at first, and one more with each step."""
        tables = block_tables(batch, context + warm_steps + steps)
        times: list[float] = []
        for step in range(warm_steps + steps):
            seqs = [self._part(str(i), context + step, 1, table, sampling) for i, table in enumerate(tables)]
            times.append(self._step_s(seqs))
        return times[warm_steps:]

    def prefill_steps_s(self, batch: int, tokens: int, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` equal steps that compute ``tokens`` tokens of each of ``batch`` prompts, after
        ``context`` others."""
        tables = block_tables(batch, context + tokens)
        return [
            self._step_s([self._part(str(i), context, tokens, table) for i, table in enumerate(tables)])
            for _ in range(steps)
        ]

    def mixed_s(self, chunk: int, batch: int, context: int) -> float:
        """Seconds of a step with ``chunk`` tokens of a prompt, and one token for each of ``batch`` requests, all after
        ``context`` tokens."""
        *tables, last = block_tables(batch + 1, context + chunk)
        seqs = [self._part(str(i), context, 1, table) for i, table in enumerate(tables)]
        return self._step_s([*seqs, self._part("chunk", context, chunk, last)])

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """The greedy continuation of ``prompt``, and the seconds that each of its tokens took: the first the prefill,
        the others a decode step each."""
        token_id, first_s = self._first_token(prompt)
        token_ids, times = [token_id], [first_s]
        [table] = block_tables(1, len(prompt) + tokens)
        for at in range(len(prompt), len(prompt) + tokens - 1):
            token_id, step_s = self._token([token_ids[-1]], at, table)
            token_ids.append(token_id)
            times.append(step_s)
        return token_ids, times

    def generate_without_cache(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """The same without keys and values of earlier steps: each token is the first token of the whole sequence before
        it."""
        token_ids: list[int] = []
        times: list[float] = []
        for _ in range(tokens):
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

    def _token(self, token_ids: list[int], start: int, table: list[int]) -> tuple[int, float]:
        started_s = time.perf_counter()
        drawn = self._runner.execute([ScheduledSeq("one", token_ids, start, table, True, _GREEDY)])
        return drawn["one"].token_id, time.perf_counter() - started_s

    def _step_s(self, seqs: list[ScheduledSeq]) -> float:
        started_s = time.perf_counter()
        self._runner.execute(seqs)
        return time.perf_counter() - started_s

    def _part(
        self, name: str, start: int, tokens: int, table: list[int], sampling: SamplingParams = _GREEDY
    ) -> ScheduledSeq:
        return ScheduledSeq(name, self._random(tokens), start, table, True, sampling)

    def _random(self, tokens: int) -> list[int]:
        drawn: list[int] = torch.randint(0, min(_TOKEN_IDS, self.ready.vocab_size), (tokens,)).tolist()
        return drawn


def blocks_for(count: int, tokens: int) -> int:
    """Blocks of ``count`` requests of ``tokens`` each."""
    return count * -(-tokens // BLOCK_SIZE)


def block_tables(count: int, tokens: int) -> list[list[int]]:
    """Block tables of ``count`` requests whose blocks are interleaved, as blocks are that were taken one by one."""
    blocks = blocks_for(1, tokens)
    return [list(range(i, count * blocks, count)) for i in range(count)]
