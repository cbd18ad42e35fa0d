"""pdserve's side of the engine's benchmark: its model runner, driven as the scheduler drives it."""

from __future__ import annotations

import statistics

from benchmarks.engine_cases import STEPS, WARM_STEPS, Case, Decode, Mixed, Prefill
from experiments.engine_alone.bare_engine import BareEngine, blocks_for


class PdserveSide:
    """An engine with random weights of ``model``'s shape in bfloat16, without its process around it."""

    def __init__(self, model: str, device: str, cases: tuple[Case, ...]) -> None:
        num_blocks = max(_blocks(case) for case in cases)
        self._engine = BareEngine(model, device, num_blocks=num_blocks, dtype="bfloat16")
        self.chunk = self._engine.chunk

    def measure_s(self, case: Case) -> float:
        """Seconds that ``case`` takes now."""
        match case:
            case Prefill():
                return self._engine.prefill_s(case.tokens)
            case Decode():
                return statistics.median(self._engine.decode_steps_s(case.batch, case.context, WARM_STEPS, STEPS))
            case Mixed():
                return self._engine.mixed_s(case.chunk, case.batch, case.context)


def _blocks(case: Case) -> int:
    match case:
        case Prefill():
            return blocks_for(1, case.tokens)
        case Decode():
            return blocks_for(case.batch, case.context + WARM_STEPS + STEPS)
        case Mixed():
            return blocks_for(case.batch + 1, case.context + case.chunk)
