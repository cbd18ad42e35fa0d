"""The process in which an engine is measured alone: ``python -m experiments.engine_alone.program TASK``.

TASK is a `Task` as JSON. The process binds itself to one core (on a GPU it is not bound), builds the engine, and writes
messages: `Built`, then `Warm` for each step of the warm-up, then in each repeat `Rates` and its samples. `Failed` comes
instead of the rest.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from experiments.messages import Message, say
from pdserve.core.errors import PdserveError, to_wire
from runtime.process import end_with_parent

if TYPE_CHECKING:
    from experiments.engine_alone.bare_engine import BareEngine


class StepCase(msgspec.Struct, frozen=True):
    """A step with a part for each of ``batch`` requests: of ``tokens`` tokens, after ``context`` others whose KV is in
    the pool. A decode step is one with single tokens."""

    batch: int
    tokens: int
    context: int

    @property
    def kind(self) -> Literal["prefill", "decode"]:
        """What the step does."""
        return "decode" if self.tokens == 1 else "prefill"

    @property
    def rows(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.tokens

    @property
    def pairs(self) -> float:
        """Pairs of a computed token and one that it attends to."""
        return self.rows * (self.context + (self.tokens + 1) / 2)


WARM_STEPS = 2
STEPS = 5
WITH = "with"
WITHOUT = "without"
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, ``repeats`` times. ``part`` decides which of the other fields count: ``cache`` and ``profile``
    generate ``output_len`` tokens after ``prompt_len`` (``cache`` also without a KV cache), ``prefill`` computes
    prompts of ``lengths``, ``decode`` makes steps of ``batches`` at ``context``, ``steps`` makes those of ``cases``.
    ``core``: None on a GPU."""

    model: str
    device: str
    core: int | None
    part: Literal["cache", "profile", "prefill", "decode", "steps"]
    repeats: int
    seed: int
    prompt_len: int = 0
    output_len: int = 0
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    context: int = 0
    cases: tuple[StepCase, ...] = ()


class Built(Message):
    """The engine is built. ``core``: None on a GPU. ``chunk``: most tokens of a step. ``arithmetic``: see
    `ModelArithmetic.to_dict`. ``last_cache_bytes``: the processor's largest cache; 0 on a GPU, or if it is unknown."""

    device: str
    dtype: str
    core: int | None
    threads: int
    chunk: int
    arithmetic: dict[str, Any]
    last_cache_bytes: int


class Warm(Message):
    """A step of the warm-up is done."""


class Rates(Message):
    """The device's product rate and read rate, measured between the samples of each repeat."""

    flops_per_s: float
    bytes_per_s: float


class Sample(Message):
    """What was measured once in a repeat, by part: ``cache`` has ``arm``, ``times_s`` of each token and ``token_ids``
    (both arms of a repeat have the same prompt); ``profile`` has ``prefill_s`` of token 1 and ``decode_s`` of all
    others; ``prefill``, ``decode`` and ``steps`` have ``time_s`` of a prompt of ``tokens``, of a step of ``batch``
    requests (the median of `STEPS`), or of the case with the index ``case`` (the median of a few)."""

    repeat: int
    values: dict[str, Any]


class Failed(Message):
    """``error`` and ``message`` are a `PdserveError`, as `to_wire` writes it."""

    error: str
    message: str


def main() -> None:
    """The whole process. Exits with 1 after `Failed`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what ends
    end_with_parent()
    try:
        _run(msgspec.json.decode(sys.argv[1], type=Task))
    except PdserveError as error:
        say(Failed(*to_wire(error)))
        raise SystemExit(1) from None


def _run(task: Task) -> None:
    if task.core is not None:
        os.sched_setaffinity(0, (task.core,))
    import torch  # it counts its cores when it is imported

    from checkpoints.source import resolve_model
    from engine.model.kv_pool import TORCH_DTYPES
    from experiments.engine_alone.arithmetic import ModelArithmetic
    from experiments.engine_alone.bare_engine import BareEngine, blocks_for
    from experiments.engine_alone.ceilings import Ceilings

    num_blocks = max(
        blocks_for(1, max((task.prompt_len + task.output_len, *task.lengths))),
        blocks_for(max(task.batches, default=0), task.context + WARM_STEPS + STEPS),
        *(blocks_for(case.batch, case.context + max(case.tokens, WARM_STEPS + STEPS)) for case in task.cases),
    )
    most_seqs = max((64, *task.batches, *(case.batch for case in task.cases)))
    engine = BareEngine(task.model, task.device, num_blocks=num_blocks, max_num_seqs=most_seqs)
    dtype = engine.ready.layout.dtype
    say(
        Built(
            device=engine.ready.device,
            dtype=dtype,
            core=task.core,
            threads=torch.get_num_threads(),
            chunk=engine.chunk,
            arithmetic=ModelArithmetic.of(resolve_model(task.model).shape, dtype).to_dict(),
            last_cache_bytes=_last_cache_bytes() if task.device == "cpu" else 0,
        )
    )
    ceilings = Ceilings(torch.device(task.device), TORCH_DTYPES[dtype])
    measures = {"cache": _cache, "profile": _profile, "prefill": _prefill, "decode": _decode, "steps": _steps}
    measure = measures[task.part]
    for repeat in range(-1, task.repeats):  # the first one is the warm-up
        if repeat >= 0:
            bare, packed = ceilings.product_flops(1), ceilings.packed_flops(1)
            say(Rates(max(bare, packed), ceilings.read_bytes_per_s(1)))
        for values in measure(task, engine, repeat):
            say(Warm() if repeat < 0 else Sample(repeat, values))


def _cache(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    prompt = _prompt(task, engine, repeat)
    arms = (WITH, WITHOUT) if repeat % 2 == 0 else (WITHOUT, WITH)
    tokens = task.output_len if repeat >= 0 else min(4, task.output_len)
    for arm in arms:
        generate = engine.generate if arm == WITH else engine.generate_without_cache
        token_ids, times_s = generate(prompt, tokens)
        yield {"arm": arm, "times_s": [round(each, 7) for each in times_s], "token_ids": token_ids}


def _profile(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    tokens = task.output_len if repeat >= 0 else min(4, task.output_len)
    _, times_s = engine.generate(_prompt(task, engine, repeat), tokens)
    yield {"prefill_s": times_s[0], "decode_s": sum(times_s[1:])}


def _prefill(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    for tokens in _order(task.lengths, repeat):
        yield {"tokens": tokens, "time_s": engine.prefill_s(tokens)}


def _decode(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    for batch in _order(task.batches, repeat):
        steps = engine.decode_steps_s(batch, task.context, WARM_STEPS, STEPS)
        yield {"batch": batch, "time_s": statistics.median(steps)}


def _steps(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    for index in _order(tuple(range(len(task.cases))), repeat):
        case = task.cases[index]
        if case.kind == "decode":
            steps = engine.decode_steps_s(case.batch, case.context, WARM_STEPS, STEPS)
        else:
            steps = engine.prefill_steps_s(case.batch, case.tokens, case.context, 2)
        yield {"case": index, "time_s": statistics.median(steps)}


def _order(values: tuple[int, ...], repeat: int) -> tuple[int, ...]:
    """Forwards and backwards in turn, so that a drift of the machine cancels out."""
    return values if repeat % 2 == 0 else values[::-1]


def _prompt(task: Task, engine: BareEngine, repeat: int) -> list[int]:
    draw = random.Random(f"{task.seed}/{task.part}/{repeat}")
    return [draw.randrange(engine.ready.vocab_size) for _ in range(task.prompt_len)]


def _last_cache_bytes() -> int:
    """Size of the processor's largest cache; 0 if the kernel does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units), default=0)


if __name__ == "__main__":
    main()
