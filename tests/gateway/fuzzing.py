"""How much the fuzz tests draw, and the service that they draw for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.pb import inference_pb2 as pb
from tests.fake_worker import count_up
from tests.gateway.conftest import Service

SEED = 7
ANSWER_S = 30.0
"""A request that takes longer hangs."""
CONCURRENCY = 16

SAMPLING: dict[str, Any] = {
    "max_tokens": 6, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2**62, "stop": ["fox", "日本"],
    "stop_token_ids": [3, 999], "ignore_eos": True, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
}  # fmt: skip
"""What both APIs have by the same names."""
END_TOKEN = 1
PROMPT = (5, 6, 7)


@dataclass(frozen=True)
class Draws:
    """Numbers of inputs."""

    mutated_grpc: int
    schema_http: int


_IN_SOAK = [pytest.mark.soak, pytest.mark.timeout(3_000)]
short_and_soak = pytest.mark.parametrize(
    "draws",
    [pytest.param(Draws(160, 50), id="short"), pytest.param(Draws(11_000, 4_000), id="soak", marks=_IN_SOAK)],
)


def ends_soon(service: Service) -> None:
    """Let all outputs end after a few tokens, however many were asked for."""

    def next_token(token_ids: Sequence[int]) -> int:
        return END_TOKEN if len(token_ids) % 8 == 7 else count_up(token_ids)

    for worker in service.fleet.values():
        worker._next_token = next_token
        worker.eos_token_id = END_TOKEN


async def check_alive(service: Service) -> None:
    """Nothing is left of earlier requests, and the next one is answered as ever."""
    await service.until(
        lambda: (
            service.is_idle
            and service.gateway.router.running == service.gateway.router.queued == 0
            and service.gateway._inference.in_progress == 0
        )
    )
    service.check_idle()
    assert not service.gateway._inference._being_read
    assert not service.gateway._inference._claims
    tokens, completion = await service.generate(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(max_tokens=3))
    assert [token.token_id for token in tokens] == list(completion.token_ids) == [8, 9, 10]
    await service.until(lambda: service.is_idle)
