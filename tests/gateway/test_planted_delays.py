from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pb import inference_pb2 as pb

if TYPE_CHECKING:
    from tests.gateway.conftest import StartService

PROMPT = pb.TokenIds(ids=[1, 2, 3, 4, 5])


@pytest.mark.parametrize("stage", ["gateway", "network", "route", "dispatch"])
@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_a_planted_delay_shows_in_its_stage_alone(
    start_service: StartService, stage: str, mode: pb.Mode.ValueType
) -> None:
    service = await start_service("p0", "d0", testing={"delay_ms": {stage: 60.0}})
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    arrivals_ms = []
    sampling = pb.Sampling(max_tokens=3)
    async for message in service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT, sampling=sampling, mode=mode)):
        arrivals_ms.append((loop.time() - started_s) * 1e3)
        completion = message.completion
    for figure, client_ms in (
        (completion.gateway_ttft_ms, arrivals_ms[0]),
        (completion.gateway_ttft_decode_ms, arrivals_ms[1]),
    ):
        stages = {**figure, "network": client_ms - sum(figure.values())}
        assert 59 <= stages.pop(stage) <= 90
        assert all(-5 <= length_ms <= 25 for length_ms in stages.values()), stages
