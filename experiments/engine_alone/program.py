"""Measures an engine alone, in a process of its own: `measure_alone` starts it.

The process binds itself to one core (on a GPU it is not bound), builds the engine, and writes messages: `Built`, then
in each repeat `Rates` and its samples, and `Done`. `Failed` comes instead of the rest."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from checkpoints.arithmetic import ModelArithmetic
from engine.process.client import ALLOCATOR_SETTINGS
from experiments.child_process import ChildFailed, ChildProcess, call
from experiments.engine_alone.steps import GuessCase, StepCase
from experiments.messages import Done, Message, say
from pdserve.core.errors import LaunchError, PdserveError, from_wire, to_wire

if TYPE_CHECKING:
    from experiments.engine_alone.bare_engine import BareEngine

WITH = "with"
WITHOUT = "without"
ONE_THREAD = {**ALLOCATOR_SETTINGS, "OMP_NUM_THREADS": "1"}
"""The environment of an engine process with one thread."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, ``repeats`` times after a warm-up: each of ``cases``, and generations of ``output_len`` tokens
    after ``prompt_len``, in each of ``arms``: with and without a KV cache; or, of each of ``guesses``, with speculation
    and without, of some by ``draft_model``. ``core``: None on a GPU. ``chunk``: most tokens of a step (default: a
    prefill worker's budget)."""

    model: str
    device: str
    core: int | None
    repeats: int
    seed: int
    cases: tuple[StepCase, ...] = ()
    arms: tuple[str, ...] = ()
    guesses: tuple[GuessCase, ...] = ()
    prompt_len: int = 0
    output_len: int = 0
    chunk: int | None = None
    draft_model: str = ""

    @property
    def measurements(self) -> int:
        """How many samples there are, those of the warm-up included."""
        return (self.repeats + 1) * (len(self.cases) + len(self.guesses or self.arms))


class Built(Message):
    """The engine is built. ``core``: None on a GPU. ``chunk``: most tokens of a step. ``last_cache_bytes``: the
    processor's largest cache; 0 on a GPU, or if it is unknown."""

    device: str
    dtype: str
    core: int | None
    threads: int
    chunk: int
    arithmetic: ModelArithmetic
    last_cache_bytes: int


class Rates(Message):
    """The device's product rate and read rate, measured between the samples of each repeat."""

    flops_per_s: float
    bytes_per_s: float


class Sample(Message):
    """What was measured once in a ``repeat`` (-1: the warm-up). ``values`` are ``case``, the index of a case, and its
    ``time_s``; or of a generation ``arm``, the ``times_s`` of its tokens and ``token_ids`` (all arms of a repeat have
    the same prompt); or ``guess``, the index of guesses, with ``rate``, ``drafts`` and ``accepted`` by arm."""

    repeat: int
    values: dict[str, Any]


class Failed(Message):
    """``error`` and ``message`` are a `PdserveError`, as `to_wire` writes it."""

    error: str
    message: str


async def measure_alone(task: Task, take: Callable[[Rates | Sample], None]) -> Built:
    """Have a process measure ``task``, and hand what it measures to ``take``. Raises the error that it reports;
    LaunchError if it just ends; WrongMessage if it writes anything else. The process ends with this call."""
    built: Built | None = None
    command = call(measure, msgspec.to_builtins(task))
    with ChildProcess("the engine under measurement", command, ONE_THREAD) as child:
        while True:
            try:
                expected = Built | Rates | Sample | Failed | Done
                message = await asyncio.to_thread(child.receive, None, expected)
            except ChildFailed as error:
                raise LaunchError(str(error)) from None
            match message:
                case Built():
                    built = message
                case Failed():
                    raise from_wire(message.error, message.message)
                case Done():
                    assert built is not None, "it comes first"
                    return built
                case _:
                    take(message)


def measure(task: Any) -> None:
    """What the process does."""
    try:
        _run(msgspec.convert(task, Task))
    except PdserveError as error:
        say(Failed(*to_wire(error)))


def _run(task: Task) -> None:
    if task.core is not None:
        os.sched_setaffinity(0, (task.core,))
    import torch  # it counts its cores when it is imported

    from checkpoints.source import resolve_model
    from engine.model.kv_pool import TORCH_DTYPES
    from experiments.engine_alone.bare_engine import BareEngine, blocks_for, blocks_of
    from experiments.engine_alone.ceilings import Ceilings

    batch = max((1, *(case.batch for case in task.guesses)))
    num_blocks = max(blocks_of(task.cases), blocks_for(batch, task.prompt_len + task.output_len))
    most_seqs = max((64, *(case.batch for case in task.cases)))
    engine = BareEngine(
        task.model,
        task.device,
        num_blocks=num_blocks,
        max_num_seqs=most_seqs,
        chunk=task.chunk,
        draft_model=task.draft_model,
    )
    dtype = engine.ready.dtype
    say(
        Built(
            device=engine.ready.device,
            dtype=dtype,
            core=task.core,
            threads=torch.get_num_threads(),
            chunk=engine.chunk,
            arithmetic=ModelArithmetic.of(resolve_model(task.model).shape, dtype),
            last_cache_bytes=_last_cache_bytes() if task.device == "cpu" else 0,
        )
    )
    ceilings = Ceilings(torch.device(task.device), TORCH_DTYPES[dtype])
    for repeat in range(-1, task.repeats):  # the first one is the warm-up
        if repeat >= 0:
            flops = [ceilings.product_flops(1, packed=packed) for packed in (False, True)]
            say(Rates(max(flops), ceilings.read_bytes_per_s(1)))
        generations = _guesses(task, engine, repeat) if task.guesses else _generations(task, engine, repeat)
        for values in itertools.chain(generations, _steps(task, engine, repeat)):
            say(Sample(repeat, values))


def _generations(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"{task.seed}/{repeat}")
    prompt = [draw.randrange(engine.ready.vocab_size) for _ in range(task.prompt_len)]
    tokens = task.output_len if repeat >= 0 else min(4, task.output_len)
    for arm in _order(task.arms, repeat):
        token_ids, times_s = engine.generate(prompt, tokens, cached=arm == WITH)
        yield {"arm": arm, "times_s": [round(each, 7) for each in times_s], "token_ids": token_ids}


def _guesses(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    guessing = engine.guessing(task.prompt_len, task.output_len if repeat >= 0 else min(4, task.output_len))
    for index in _order(tuple(range(len(task.guesses))), repeat):
        arms = _order(task.arms, repeat)
        yield {"guess": index, **guessing.measure(task.guesses[index], arms, f"{task.seed}/{repeat}/{index}")}


def _steps(task: Task, engine: BareEngine, repeat: int) -> Iterator[dict[str, Any]]:
    for index in _order(tuple(range(len(task.cases))), repeat):
        yield {"case": index, "time_s": engine.measure_s(task.cases[index])}


def _order(values: tuple[Any, ...], repeat: int) -> tuple[Any, ...]:
    """Forwards and backwards in turn, so that a drift of the machine cancels out."""
    return values if repeat % 2 == 0 else values[::-1]


def _last_cache_bytes() -> int:
    """Size of the processor's largest cache; 0 if the kernel does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units), default=0)
