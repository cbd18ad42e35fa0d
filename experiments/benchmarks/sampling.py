"""What sampling a batch costs: `python -m experiments.benchmarks.sampling`.

On one core (or one GPU): each case is a batch of rows of logits over a vocabulary of 128,256, sampled again and again,
the cases in turn. Times are milliseconds, medians and minima over the rounds, beside the time to read the logits once.
Both are taken under the allocator settings of an engine process."""

from __future__ import annotations

import itertools
import json
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas
import typer

from experiments.benchmarks.engine_process import on_one_core
from experiments.benchmarks.frame import Quick, measured, run
from experiments.child_process import ROOT

if TYPE_CHECKING:
    from engine.scheduling.structures import Structures

_VOCABULARY = 128_256
_END = 0  # the id of the tiny model's end of a sequence
_READ = "read the logits once"
_HISTORY = 1000  # distinct tokens of a request with penalties


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """``rows`` rows of normal logits with the standard deviation ``spread`` (0: a flat distribution), sampled with
    ``options`` (fields of `SamplingParams`). With ``schema`` each row is an output of its own that matches
    `_SCHEMA`."""

    name: str
    options: dict[str, float | int]
    spread: float = 1.0
    rows: int = 32
    schema: bool = False


_TOP_P = {"temperature": 0.7, "top_p": 0.9}
CASES = (
    Case("greedy", {}),
    Case("greedy, batch 1", {}, rows=1),
    Case("temperature", {"temperature": 0.7}),
    Case("top-p 0.9", _TOP_P),
    Case("top-p 0.9, peaked", _TOP_P, spread=4.0),
    Case("top-p 0.9, flat", _TOP_P, spread=0.0),
    Case("top-p 0.9, batch 1", _TOP_P, rows=1),
    Case("top-p 0.1", {**_TOP_P, "top_p": 0.1}),
    Case("top-k 50, top-p 0.9", {**_TOP_P, "top_k": 50}),
    Case("min-p 0.05", {"temperature": 0.7, "min_p": 0.05}),
    Case("penalties, top-p 0.9", {**_TOP_P, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
    Case("greedy, 5 logprobs", {"logprobs": 5}),
    Case("greedy, batch 16", {}, rows=16),
    Case("JSON schema, batch 16", {}, rows=16, schema=True),
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def sampling(cuda: Annotated[bool, typer.Option(help="on a GPU")] = False, quick: Quick = False) -> dict[str, Any]:
    """Measure the sampler."""
    on_one_core("experiments.benchmarks.sampling", cuda=cuda)
    import torch

    torch.set_num_threads(1)
    rounds = 1 if quick else 21
    device = torch.device("cuda" if cuda else "cpu")
    logits = torch.randn(32, _VOCABULARY, device=device)
    rows = {case.name: case.rows for case in CASES} | {_READ: 32}
    steps: dict[str, Callable[[], Any]] = {case.name: _step(case, device) for case in CASES}
    steps[_READ] = lambda: logits.amax(dim=1).tolist()
    times_ms = measured(steps, lambda name: timeit.timeit(steps[name], number=1) * 1e3, rounds, warm_up=2)
    return {
        "cases": pandas.DataFrame({"rows": rows, "ms": times_ms.median(), "least_ms": times_ms.min()}),
        "vocabulary": _VOCABULARY,
        "device": str(device),
        "rounds": rounds,
        "torch": torch.__version__,
    }


def _step(case: Case, device: object) -> Callable[[], None]:
    """A function that samples the next token of every row."""
    import torch

    from engine.model.sampler import sample
    from engine.scheduling.sequence import TokenHistory
    from pdserve.core.sampling import SamplingParams, StructuredOutputs

    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(case.rows, _VOCABULARY, generator=generator) * case.spread).to(device)  # type: ignore[call-overload]
    past = torch.randperm(_VOCABULARY, generator=generator)[:_HISTORY].tolist()
    histories: list[TokenHistory | None] = [TokenHistory(past, _HISTORY // 2)] * case.rows
    params = [SamplingParams(**{"seed": row, **case.options}) for row in range(case.rows)]  # type: ignore[arg-type]
    wanted = StructuredOutputs("json", json.dumps(_SCHEMA))
    structures = _structures() if case.schema else None
    if structures is not None:
        params, histories = [SamplingParams(structured_outputs=wanted)] * case.rows, [None] * case.rows
    # Others at each step, so that outputs reach every part of the schema.
    variants = [logits.roll(7919 * shift, 1) for shift in range(8 if case.schema else 1)]
    positions = itertools.count(1)

    def step() -> None:
        position = next(positions)
        for row, each in enumerate(histories if structures is not None else ()):
            if structures is not None and (each is None or _END in each.output_ids):
                histories[row] = TokenHistory((), 0, structures.match(wanted, ()).result())
        with torch.inference_mode():
            tokens = sample(variants[position % len(variants)], params, [position] * case.rows, histories)
        for each, token in zip(histories, tokens, strict=True):
            if each is not None and structures is not None:
                each.append(token.token_id)

    return step


def _structures() -> Structures:
    """Structured outputs over the tiny model's vocabulary, made as large as the benchmark's by pairs of its tokens."""
    from engine.scheduling.structures import Structures

    data = json.loads((ROOT / "models" / "tiny" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    for pair in itertools.product([text for text in vocabulary if len(text) > 1], repeat=2):
        vocabulary.setdefault("".join(pair), len(vocabulary))
        if len(vocabulary) == _VOCABULARY:
            break
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        return Structures(Path(file.name), _VOCABULARY, [_END], lambda: None)


if __name__ == "__main__":
    run(sampling)
