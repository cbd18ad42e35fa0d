from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.pb import inference_pb2 as pb

if TYPE_CHECKING:
    from tests.gateway.conftest import StartService

PROMPT = pb.TokenIds(ids=[1, 2, 3, 4, 5])


@pytest.mark.parametrize("stage", ["gateway", "network", "route", "dispatch"])
@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_a_planted_delay_shows_in_its_stage_alone(
    start_service: StartService, stage: str, mode: pb.Mode.ValueType
) -> None:
    service = await start_service("p0", "d0", testing={"delay_ms": {stage: 60.0}})
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=3), mode=mode)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 60
    while True:  # until nothing else takes the machine in the middle of a request
        started_s = loop.time()
        arrivals_ms = []
        async for message in service.stub.Generate(request):
            arrivals_ms.append((loop.time() - started_s) * 1e3)
            completion = message.completion
        late = False
        for figure, client_ms in (
            (completion.gateway_ttft_ms, arrivals_ms[0]),
            (completion.gateway_ttft_decode_ms, arrivals_ms[1]),
        ):
            stages = {**figure, "network": client_ms - sum(figure.values())}
            assert stages[stage] >= 59
            assert all(length_ms >= -5 for length_ms in stages.values()), stages
            late = late or stages.pop(stage) > 90 or max(stages.values()) > 25
        if not late:
            return
        assert loop.time() < deadline_s, (completion, arrivals_ms)
