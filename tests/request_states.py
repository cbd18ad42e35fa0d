"""Requests that are held in a state long enough to do something to them: queued, prefilling, transferring, decoding."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from pdserve import AsyncClient
from pdserve.client.status import ServiceStatus
from pdserve.core.errors import PdserveError

BLOCK = 16
NUM_BLOCKS = 400
LONG, MEDIUM, SHORT = 5_600, 4_000, 40
"""Prompt tokens: of a prefill that lasts, of a transfer that lasts, and of requests that are over soon."""
OUTPUTS = 600
VOCABULARY = 307
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
}


class State(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


def dummy_model(folder: Path) -> str:
    """A model of `SHAPE` with random weights, for ``model.path``."""
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SHAPE}))
    return f"dummy:{path}"


def settings(model: str) -> dict[str, Any]:
    """A service on which the states last: small steps, and a slow KV link."""
    engine = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64, "prefix_caching": False}
    return {
        "model": {"path": model, "dtype": "float32"},
        "engine": {**engine, "hang_timeout_s": 4.0},
        "router": {"prefill_backlog_tokens": 1, "heartbeat_s": 0.02, "heartbeat_timeout_s": 2.0},
        "transfer": {"shape_gbps": 0.016},
    }


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens."""
    return [(31 * i + 7 * seed + i * i) % VOCABULARY for i in range(tokens)]


PROMPTS = {
    State.QUEUED: prompt_of(SHORT, 1),
    State.PREFILLING: prompt_of(LONG, 2),
    State.TRANSFERRING: prompt_of(MEDIUM, 3),
    State.DECODING: prompt_of(SHORT, 4),
}
BLOCKER = prompt_of(LONG, 5)


class Running:
    """A request that is read to its end. ``tokens`` are those that have come, ``error`` is what ended it."""

    def __init__(self, client: AsyncClient, prompt: list[int], outputs: int, timeout_s: float) -> None:
        self.tokens: list[int] = []
        self.error: PdserveError | None = None
        self.stream = client.generate(prompt, max_tokens=outputs, ignore_eos=True, mode="pd", timeout_s=timeout_s)
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for token in self.stream:
                self.tokens.append(token.token_id)
            await self.stream.result()
        except PdserveError as error:
            self.error = error


@asynccontextmanager
async def held(
    client: AsyncClient, state: State, *, timeout_s: float = 60.0
) -> AsyncIterator[tuple[Running, list[Running]]]:
    """A request that has just come into ``state``, and those that keep it queued. All are cancelled at the end."""
    others: list[Running] = []

    def start(prompt: list[int], outputs: int) -> Running:
        others.append(Running(client, prompt, outputs, timeout_s))
        return others[-1]

    try:
        if state is State.QUEUED:
            prefill = [w for w in (await client.status()).workers if w.role == "prefill" and w.state == "ready"]
            for _ in prefill:
                start(BLOCKER, 2)
            await until(client, lambda status: status.running == len(prefill))
        request = start(PROMPTS[state], OUTPUTS)
        match state:
            case State.QUEUED:
                await until(client, lambda status: status.queued == 1)
            case State.PREFILLING:
                await until(client, lambda status: any(w.role == "prefill" and w.running for w in status.workers))
            case State.TRANSFERRING:
                await until(client, lambda _: bool(request.tokens))
            case State.DECODING:
                await until(client, lambda _: len(request.tokens) >= 3)
        assert not any(each.reading.done() for each in others), [each.error for each in others]
        yield request, others[:-1]
    finally:
        for each in others:
            each.stream.cancel()
        await asyncio.gather(*(each.reading for each in others))


async def until(client: AsyncClient, holds: Callable[[ServiceStatus], bool], timeout_s: float = 30.0) -> ServiceStatus:
    """The first status for which ``holds``; AssertionError if none does in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        status = await client.status()
        if holds(status):
            return status
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.005)


def is_free(status: ServiceStatus) -> bool:
    """Whether nothing waits or runs, and every block is free."""
    return status.queued == status.running == 0 and all(w.free_blocks == w.num_blocks for w in status.workers)
