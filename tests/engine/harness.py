"""What the engine's tests share: a runner over a small pool, and cores that serve with it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints.source import resolve_model
from contract.engine import EngineEvent, KVEvent, KVRole, Rejected, Step, Submit, TokenOut
from engine.core import EngineCore, Runner
from engine.kernels.cpu_attention import CPUAttention
from engine.kernels.cpu_invariant import InvariantCPUAttention
from engine.model.decoder import Decoder, ModelStep
from engine.model.kv_pool import TORCH_DTYPES, KVPool
from engine.model.loader import load_weights
from engine.model.runner import ModelRunner
from engine.model.share import Share
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from pdserve.core.clock import MonotonicClock
from pdserve.core.kv_layout import KVLayout
from pdserve.core.request import Request
from pdserve.core.sampling import SamplingParams
from runtime import memory_file

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
BLOCK = 8


def submit(
    attempt_id: str,
    kv_role: KVRole,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    outputs: Sequence[int] = (),
    salt: str = "",
    priority: int = 0,
    ahead: bool = False,
    prefix_tokens: int = 0,
    **sampling: Any,
) -> Submit:
    """A request as the engine gets it: greedy unless ``sampling`` says otherwise, and ``max_tokens`` still wanted after
    the ``outputs`` of earlier attempts."""
    params = SamplingParams(max_tokens=max_tokens + len(outputs), **{"seed": 0, **sampling})
    request = Request(
        attempt_id,
        tuple(prompt),
        params,
        salt=salt,
        attempt_id=attempt_id,
        output_token_ids=tuple(outputs),
        priority=priority,
        ahead=ahead,
    )
    return Submit(request, kv_role, prefix_tokens)


def make_pool(layout: KVLayout, num_blocks: int, compute_dtype: torch.dtype | None = None) -> KVPool:
    """A pool on the host."""
    fd = memory_file.create("test")
    pool = KVPool.on_memory_file(layout, num_blocks, fd, compute_dtype)
    os.close(fd)
    return pool


def make_runner(
    folder: Path,
    num_blocks: int = 64,
    dtype: str = "float32",
    batch_invariant: bool = False,
    kv_dtype: str | None = None,
) -> ModelRunner:
    """A runner of the model in ``folder``. With a ``kv_dtype``, weights are scaled for FP8."""
    source = resolve_model(str(folder))
    shape = source.shape
    layout = KVLayout.uniform("", kv_dtype or dtype, BLOCK, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    weights = load_weights(source, TORCH_DTYPES[dtype], torch.device("cpu"))
    if kv_dtype is not None:
        weights.scale_kv()
    long_rope = shape.uses_long_rope(shape.max_position_embeddings)
    model = Decoder(weights, shape.max_position_embeddings, long_rope=long_rope, batch_invariant=batch_invariant)
    pool = make_pool(layout, num_blocks, model.dtype)
    kind = InvariantCPUAttention if batch_invariant else CPUAttention
    return ModelRunner(model, kind(pool, shape.num_heads, model.windows, shape.attention_softcap), pool)


class ThreadRanks:
    """The ranks of an engine as threads of this process (see `engine.model.share.Ranks`)."""

    def __init__(self, rank: int, meeting: threading.Barrier, slots: list[torch.Tensor]) -> None:
        self._rank, self._meeting, self._slots = rank, meeting, slots

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self._show(x)
        total = sum(self._slots[1:], self._slots[0])
        self.meet()
        return x.copy_(total)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self._show(x)
        assert [slot.shape[1] for slot in self._slots] == list(sizes)
        whole = torch.cat(self._slots, dim=1)
        self.meet()
        return x if self._rank else whole

    def meet(self) -> None:
        self._meeting.wait(30.0)

    def _show(self, x: torch.Tensor) -> None:
        self._slots[self._rank] = x.clone()
        self.meet()


def make_ranks(folder: Path, ranks: int, num_blocks: int = 64, dtype: str = "float32") -> ModelRunner:
    """A tensor-parallel runner of the model in ``folder``: rank 0, which the others follow in threads."""
    source = resolve_model(str(folder))
    shape, meeting, slots = source.shape, threading.Barrier(ranks), [torch.empty(0)] * ranks
    long_rope = shape.uses_long_rope(shape.max_position_embeddings)
    threads = ThreadPoolExecutor(ranks)
    fd = memory_file.create("test")
    others: list[ModelRunner] = []

    def follow(runner: ModelRunner, seqs: Sequence[ScheduledSeq]) -> None:
        try:
            runner.follow(seqs)
        except BaseException:
            meeting.abort()
            raise

    def lead(seqs: Sequence[ScheduledSeq]) -> None:
        for runner in others:
            threads.submit(follow, runner, seqs)

    def make(rank: int) -> ModelRunner:
        share = Share(shape, rank, ranks)
        weights = load_weights(source, TORCH_DTYPES[dtype], torch.device("cpu"), share=share)
        own = ThreadRanks(rank, meeting, slots)
        model = Decoder(weights, shape.max_position_embeddings, long_rope=long_rope, share=share, ranks=own)
        layout = KVLayout.uniform("", dtype, BLOCK, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        pool = KVPool.on_memory_file(layout, num_blocks, fd, model.dtype, share.kv_heads, rank > 0)
        attention = CPUAttention(pool, share.shape.num_heads, model.windows, shape.attention_softcap)
        return ModelRunner(model, attention, pool, lead=None if rank else lead)

    first = make(0)
    others += [make(rank) for rank in range(1, ranks)]
    os.close(fd)
    return first


def prompt_logits(folder: Path, prompt: Sequence[int], dtype: str, chunk: int) -> torch.Tensor:
    """Logits ``[len(prompt), vocabulary]`` after each token of ``prompt``, in ``dtype``, ``chunk`` tokens at a time
    (with 1 they go the way of decodes)."""
    runner = make_runner(folder, dtype=dtype)
    blocks = list(range(runner.pool.layout.blocks_for(len(prompt))))
    starts = range(0, len(prompt), chunk)
    steps = [[ScheduledSeq("", prompt[start : start + chunk], start, blocks, True, GREEDY)] for start in starts]
    return logits_of(runner, steps)[""]


def logits_of(runner: ModelRunner, steps: Sequence[Sequence[ScheduledSeq]]) -> dict[str, torch.Tensor]:
    """Logits ``[tokens, vocabulary]`` after each token of each sequence, whose parts are in ``steps``."""
    logits: dict[str, list[torch.Tensor]] = {}
    device = runner.pool.tensor.device
    for seqs in steps:
        ordered = runner._attention.order(seqs)
        tokens = [token for seq in ordered for token in seq.token_ids]
        positions = [position for seq in ordered for position in range(seq.start, seq.end)]
        plan = runner._attention.plan(ordered)
        step = ModelStep(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), plan)
        with torch.inference_mode():
            rows = runner._model.logits(runner._model.forward(step, runner.pool))
        for seq, part in zip(ordered, torch.split(rows, [len(seq.token_ids) for seq in ordered]), strict=True):
            logits.setdefault(seq.attempt_id, []).append(part)
    return {name: torch.cat(parts) for name, parts in logits.items()}


def crowded_steps(
    token_ids: Sequence[int], vocab_size: int, block_size: int, draw: random.Random
) -> list[list[ScheduledSeq]]:
    """Steps that compute ``token_ids`` (the sequence "") in parts of random sizes, many of them decodes, beside parts
    of other sequences."""
    others: list[tuple[list[int], list[int], int]] = []  # tokens, blocks, tokens computed
    free = list(range(1, 64))
    draw.shuffle(free)

    def blocks_for(tokens: Sequence[int]) -> list[int]:
        return [free.pop() for _ in range(-(-len(tokens) // block_size))]

    mine, steps, start = blocks_for(token_ids), list[list[ScheduledSeq]](), 0
    while start < len(token_ids):
        size = draw.choice([1, 1, 2, 5, 17])
        step = [ScheduledSeq("", token_ids[start : start + size], start, mine, True, GREEDY)]
        if len(others) < 4 and len(free) > 12:
            tokens = [draw.randrange(vocab_size) for _ in range(draw.randrange(1, 4 * block_size))]
            others.append((tokens, blocks_for(tokens), 0))
        for i, (tokens, blocks, done) in enumerate(others):
            part = tokens[done : done + draw.choice([0, 1, 9])]
            if part:
                step.append(ScheduledSeq(str(i), part, done, blocks, True, GREEDY))
                others[i] = tokens, blocks, done + len(part)
        steps.append(step)
        start += size
    return steps


@dataclass
class Outbox:
    """Keeps what an engine tells."""

    tokens: dict[str, list[TokenOut]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    kv_events: list[KVEvent] = field(default_factory=list)

    def send(self, *events: EngineEvent) -> None:
        """Note the tokens, and why requests were rejected."""
        for event in events:
            if isinstance(event, Rejected):
                self.rejected[event.attempt_id] = event.message
            if isinstance(event, Step):
                self.steps.append(event)
                for token in event.tokens:
                    self.tokens.setdefault(token.attempt_id, []).append(token)

    def send_kv(self, *events: KVEvent) -> None:
        """Note them."""
        self.kv_events += events

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """The tokens of all requests."""
        return {name: [token.token_id for token in tokens] for name, tokens in self.tokens.items()}


def make_core(
    runner: Runner, scheduler: Scheduler, run_ahead: bool = False, structures: Any = None
) -> tuple[EngineCore, Outbox]:
    """An engine without its process, and what it tells."""
    outbox = Outbox()
    return EngineCore(scheduler, runner, MonotonicClock(), outbox, run_ahead, structures), outbox


def generate(
    runner: ModelRunner,
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    chunk: int | None = None,
    stagger: int = 0,
    run_ahead: bool = False,
) -> dict[str, list[int]]:
    """``num_tokens`` greedy tokens after each prompt, in common steps: prompts in chunks of ``chunk`` tokens, the i-th
    of them from step ``i * stagger`` on, each in scattered blocks."""
    pool = runner.pool
    config = SchedulerConfig(
        10_000, len(prompts), 10_000, pool.layout.block_size, pool.num_blocks, prefix_caching=False, chunk_tokens=chunk
    )
    core, outbox = make_core(runner, Scheduler(config, MonotonicClock()), run_ahead)
    random.Random(7).shuffle(core.scheduler.blocks._free)
    for name, prompt in prompts.items():
        core.take(submit(name, KVRole.LOCAL, prompt, num_tokens, ignore_eos=True))
        for _ in range(stagger):
            core.step()
    while core.step():
        pass
    return outbox.token_ids
