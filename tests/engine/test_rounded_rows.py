"""Steps whose rows are rounded up, so that few kernels have to be made, and fused attention over whole groups of
columns: the same keys, values and logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import engine.kernels.cpu_attention
from engine.kernels.cpu_attention import CPUAttention
from engine.model.decoder import ROWS_STEP
from engine.model.runner import ModelRunner
from engine.scheduling.batch import ScheduledSeq
from tests.engine.harness import GREEDY, make_runner
from tests.random_models import save_random_model


def computed(runner: ModelRunner, prompts: list[list[int]], chunk: int) -> torch.Tensor:
    """The logits after the prompts, all computed together in chunks, beside a request that decodes."""
    tables = [list(range(8 * number, 8 * number + 8)) for number in range(len(prompts))]
    logits = []
    for start in range(0, max(map(len, prompts)), chunk):
        seqs = [
            ScheduledSeq(str(number), prompt[start : start + chunk], start, table, True, GREEDY)
            for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
            if start < len(prompt)
        ]
        step, wanted, _ = runner._compute(runner._attention.order(seqs), False, None)
        assert step is not None
        logits += [step[row] for row in range(len(wanted))]
    return torch.stack(logits)


@pytest.mark.parametrize("chunk", [64, 19])
@pytest.mark.parametrize("shape", ["gqa", "mistral_window"])
def test_rounded_rows_and_columns_change_nothing(
    tmp_path: Path, shape: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(chunk)
    prompts = [[draw.randrange(1, 300) for _ in range(length)] for length in (37, 1, 23, 20, 50)]
    assert sum(map(len, prompts)) % ROWS_STEP
    found, pools = [], []
    for rounded in (False, True):
        monkeypatch.setattr(engine.kernels.cpu_attention, "COLUMNS_STEP", 32 if rounded else 1)
        runner = make_runner(save_random_model(tmp_path, shape))
        runner._model.rounds_rows = rounded
        attention = runner._attention
        assert isinstance(attention, CPUAttention)
        attention.fused = True
        with torch.inference_mode():
            found.append(computed(runner, prompts, chunk))
        pools.append(runner.pool.tensor.clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[1], pools[0], rtol=1e-4, atol=1e-4)
