"""What the engine's tests share: a runner over a small pool, and a hand-driven generation loop."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints.source import resolve_model
from engine.kernels.cpu_attention import CPUAttention
from engine.messages import EngineEvent, KVEvent, KVRole, Rejected, Step, Submit, TokenOut
from engine.model.decoder import Decoder, ModelStep
from engine.model.kv_pool import TORCH_DTYPES, KVPool
from engine.model.loader import load_weights
from engine.model.runner import ModelRunner
from engine.scheduling.batch import ScheduledSeq
from engine.scheduling.sequence import TokenHistory
from kv_transfer.memory import HostMemory
from kv_transfer.pool import Pool
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
    )
    return Submit(request, kv_role, prefix_tokens)


def make_runner(folder: Path, num_blocks: int = 64, block_size: int = BLOCK) -> ModelRunner:
    """A float32 runner of the model in ``folder``."""
    source = resolve_model(str(folder))
    shape = source.shape
    layout = KVLayout.uniform(
        source.model_hash(), "float32", block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim
    )
    fd = memory_file.create("test")
    pool = KVPool.on_memory_file(layout, num_blocks, fd)
    os.close(fd)
    weights = load_weights(source, torch.float32, torch.device("cpu"))
    long_rope = shape.uses_long_rope(shape.max_position_embeddings)
    model = Decoder(weights, shape.max_position_embeddings, long_rope=long_rope)
    return ModelRunner(model, CPUAttention(pool, shape.num_heads, model.windows, shape.attention_softcap), pool)


def prompt_logits(folder: Path, prompt: Sequence[int], dtype: str, chunk: int) -> torch.Tensor:
    """Logits ``[len(prompt), vocabulary]`` after each token of ``prompt``, in ``dtype``, ``chunk`` tokens at a time
    (with 1 they go the way of decodes)."""
    source = resolve_model(str(folder))
    shape = source.shape
    layout = KVLayout.uniform("test", dtype, BLOCK, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    blocks = list(range(layout.blocks_for(len(prompt))))
    fd = memory_file.create("test")
    pool = KVPool.on_memory_file(layout, len(blocks), fd)
    os.close(fd)
    device = torch.device("cpu")
    weights = load_weights(source, TORCH_DTYPES[dtype], device)
    long_rope = shape.uses_long_rope(shape.max_position_embeddings)
    model = Decoder(weights, len(prompt), long_rope=long_rope)
    attention = CPUAttention(pool, shape.num_heads, model.windows, shape.attention_softcap)
    logits: list[torch.Tensor] = []
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        seq = ScheduledSeq("prompt", tokens, start, blocks, True, GREEDY)
        positions = torch.arange(start, start + len(tokens))
        step = ModelStep(torch.tensor(list(tokens)), positions, attention.plan([seq]))
        with torch.inference_mode():
            logits.append(model.logits(model.forward(step, pool)))
    return torch.cat(logits)


@dataclass
class Outbox:
    """Keeps what an engine tells."""

    tokens: dict[str, list[TokenOut]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)

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
        """Nothing."""


@dataclass
class _State:
    tokens: list[int]
    prompt: int
    params: SamplingParams
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    history: TokenHistory | None = None


def generate(
    runner: ModelRunner,
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    chunk: int = 10_000,
    params: Mapping[str, SamplingParams] | None = None,
    num_blocks: int = 64,
    stagger: int = 0,
) -> dict[str, list[int]]:
    """``num_tokens`` tokens after each prompt, in common steps: prompts in chunks of ``chunk`` tokens, the i-th of
    them from step ``i * stagger`` on, each in scattered blocks."""
    free = list(range(num_blocks))
    random.Random(7).shuffle(free)
    states = {rid: _State(list(p), len(p), (params or {}).get(rid, GREEDY)) for rid, p in prompts.items()}
    for state in states.values():
        if state.params.penalises:
            state.history = TokenHistory(state.tokens, state.prompt)
    step = 0
    while True:
        seqs: list[ScheduledSeq] = []
        for i, (rid, state) in enumerate(states.items()):
            if step < i * stagger or len(state.tokens) - state.prompt >= num_tokens:
                continue
            end = min(len(state.tokens), state.computed + chunk)
            while len(state.blocks) * BLOCK < end:
                state.blocks.append(free.pop())
            seqs.append(
                ScheduledSeq(
                    rid,
                    state.tokens[state.computed : end],
                    state.computed,
                    state.blocks,
                    end == len(state.tokens),
                    state.params,
                    state.history,
                )
            )
            state.computed = end
        if not seqs and step >= len(states) * stagger:
            return {rid: state.tokens[state.prompt :] for rid, state in states.items()}
        for rid, token in (runner.execute(seqs) if seqs else {}).items():
            state = states[rid]
            state.tokens.append(token.token_id)
            if state.history is not None:
                state.history.append(token.token_id)
        step += 1


def fill(pool: Pool, block_ids: Sequence[int], data: bytes, layers: range | None = None) -> None:
    """Write ``data`` into blocks of a pool on the host, as a receiver does."""
    assert isinstance(pool.memory, HostMemory)
    for region in pool.regions(block_ids, layers):
        pool.memory.view(region)[:], data = data[: region.size], data[region.size :]
    assert not data


def read(pool: Pool, block_ids: Sequence[int], layers: range | None = None) -> bytes:
    """What blocks of a pool on the host hold."""
    assert isinstance(pool.memory, HostMemory)
    return b"".join(pool.memory.view(region) for region in pool.regions(block_ids, layers))
