"""pdserve's side of the engine's benchmark: its model runner, driven as the scheduler drives it."""

from __future__ import annotations

import os
import statistics
import time

import torch

from benchmarks.engine_cases import STEPS, WARM_STEPS, Case, Decode, Mixed, Prefill
from engine.process.build import build_engine
from engine.scheduling.batch import ScheduledSeq
from engine.spec import DEFAULT_BLOCK_SIZE, EngineSpec
from pdserve.core import memory_file
from pdserve.core.sampling import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


class PdserveSide:
    """An engine with random weights of ``model``'s shape in bfloat16, without its process around it."""

    def __init__(self, model: str, device: str, cases: tuple[Case, ...]) -> None:
        num_blocks = max(-(-_tokens(case) // DEFAULT_BLOCK_SIZE) for case in cases)
        fd = memory_file.create("benchmark")
        try:
            built = build_engine(
                EngineSpec(
                    model=model, dtype="bfloat16", device=device, block_size=DEFAULT_BLOCK_SIZE, num_blocks=num_blocks
                ),
                fd,
            )
        finally:
            os.close(fd)
        self._runner = built.runner
        self._block_size = DEFAULT_BLOCK_SIZE
        self.chunk = built.scheduler_config.max_num_batched_tokens

    def measure_s(self, case: Case) -> float:
        """Seconds that ``case`` takes now."""
        match case:
            case Prefill():
                return self._prefill_s(case.tokens)
            case Decode():
                return self._decode_s(case)
            case Mixed():
                return self._mixed_s(case)

    def _prefill_s(self, tokens: int) -> float:
        blocks = list(range(-(-tokens // self._block_size)))
        started_s = time.perf_counter()
        for start in range(0, tokens, self.chunk):
            end = min(tokens, start + self.chunk)
            self._runner.execute([_part("p", start, end, blocks, sample=end == tokens)])
        return time.perf_counter() - started_s

    def _decode_s(self, case: Decode) -> float:
        tables = self._tables(case.batch, case.context + WARM_STEPS + STEPS)
        times: list[float] = []
        for step in range(WARM_STEPS + STEPS):
            at = case.context + step
            seqs = [_part(str(i), at, at + 1, table, sample=True) for i, table in enumerate(tables)]
            times.append(self._step_s(seqs))
        return statistics.median(times[WARM_STEPS:])

    def _mixed_s(self, case: Mixed) -> float:
        tables = self._tables(case.batch + 1, case.context + case.chunk)
        seqs = [
            _part(str(i), case.context, case.context + 1, table, sample=True) for i, table in enumerate(tables[:-1])
        ]
        seqs.append(_part("chunk", case.context, case.context + case.chunk, tables[-1], sample=True))
        return self._step_s(seqs)

    def _step_s(self, seqs: list[ScheduledSeq]) -> float:
        started_s = time.perf_counter()
        self._runner.execute(seqs)
        return time.perf_counter() - started_s

    def _tables(self, count: int, tokens: int) -> list[list[int]]:
        """Block tables of ``count`` requests whose blocks are interleaved, as blocks are that were taken one by one."""
        blocks = -(-tokens // self._block_size)
        return [list(range(i, count * blocks, count)) for i in range(count)]


def _part(name: str, start: int, end: int, blocks: list[int], *, sample: bool) -> ScheduledSeq:
    token_ids = torch.randint(0, 1000, (end - start,)).tolist()
    return ScheduledSeq(name, token_ids, start, blocks, sample, _GREEDY)


def _tokens(case: Case) -> int:
    match case:
        case Prefill():
            return case.tokens
        case Decode():
            return case.batch * (case.context + WARM_STEPS + STEPS + 64)
        case Mixed():
            return (case.batch + 1) * (case.context + case.chunk + 64)
