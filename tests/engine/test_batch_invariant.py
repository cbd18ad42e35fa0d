"""With `engine.batch_invariant` the logits of a sequence are the same bits whatever else is in its steps, however its
prompt is cut, and whether a token is computed as a decode or, after a retry, as part of a prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.scheduling.batch import ScheduledSeq
from tests.engine.harness import BLOCK, GREEDY, crowded_steps, logits_of, make_runner
from tests.engine.test_model_vs_transformers import BASE, GEMMA2, MIXTRAL, QWEN3
from tests.random_models import greedy_tokens_of_all, save_random

TOKENS = 61
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 192, "intermediate_size": 416},
    "qwen3": QWEN3,
    "gemma2": GEMMA2,  # windows, soft caps, norms around, GELU
    "mixtral": MIXTRAL,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_batch(family: str, dtype: str, tmp_path: Path) -> None:
    save_random(tmp_path, BASE | FAMILIES[family], seed=3)
    runner = make_runner(tmp_path, dtype=dtype, batch_invariant=True)
    draw = random.Random(family)
    vocabulary = BASE["vocab_size"]
    tokens = [draw.randrange(vocabulary) for _ in range(TOKENS)]
    alone = logits_of(runner, [[ScheduledSeq("", tokens, 0, list(range(-(-TOKENS // BLOCK))), True, GREEDY)]])[""]
    for _ in range(4):
        crowded = logits_of(runner, crowded_steps(tokens, vocabulary, BLOCK, draw))[""]
        assert torch.equal(crowded, alone)


def test_the_default_does_depend_on_it(tmp_path: Path) -> None:
    """So the test above can fail."""
    save_random(tmp_path, BASE | FAMILIES["llama"], seed=3)
    runner = make_runner(tmp_path, dtype="bfloat16")
    tokens = [random.Random(1).randrange(BASE["vocab_size"]) for _ in range(TOKENS)]
    alone = logits_of(runner, [[ScheduledSeq("", tokens, 0, list(range(-(-TOKENS // BLOCK))), True, GREEDY)]])[""]
    crowded = logits_of(runner, crowded_steps(tokens, BASE["vocab_size"], BLOCK, random.Random(2)))[""]
    assert not torch.equal(crowded, alone)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    save_random(tmp_path, BASE | FAMILIES["gemma2"], seed=5)
    runner = make_runner(tmp_path, batch_invariant=True)
    tokens = [random.Random(1).randrange(BASE["vocab_size"]) for _ in range(TOKENS)]
    steps = crowded_steps(tokens, BASE["vocab_size"], BLOCK, random.Random(2))
    last = logits_of(runner, steps)[""][-1]
    (expected,) = greedy_tokens_of_all(tmp_path, {"": tokens}, 1, use_cache=False)[""]
    assert int(last.argmax()) == expected
