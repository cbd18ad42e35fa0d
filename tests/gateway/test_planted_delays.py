from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.planted.gateway import delay_dispatch, delay_gateway
from tests.planted.late_wire import late_wire

if TYPE_CHECKING:
    from tests.gateway.conftest import Service

DELAY_S = 0.06
PROMPT = pb.TokenIds(ids=[1, 2, 3, 4, 5])


@pytest.mark.parametrize("stage", ["gateway", "network", "route", "dispatch"])
@pytest.mark.parametrize("mode", [pb.MODE_PD, pb.MODE_COLOCATED])
async def test_a_planted_delay_shows_in_its_stage_alone(service: Service, stage: str, mode: pb.Mode.ValueType) -> None:
    delay_gateway(service.gateway, {stage: DELAY_S})
    if stage == "dispatch":
        for worker in service.fleet.values():
            delay_dispatch(worker, DELAY_S)
    with late_wire(f"127.0.0.1:{service.gateway.port}", DELAY_S if stage == "network" else 0.0) as target:
        async with grpc.aio.insecure_channel(target) as channel:
            await check(inference_pb2_grpc.InferenceStub(channel), stage, mode)


async def check(stub: Any, stage: str, mode: pb.Mode.ValueType) -> None:
    """Some request, which nothing else disturbs, has the delay in ``stage`` and in no other."""
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=3), mode=mode)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 60
    while True:  # until nothing else takes the machine in the middle of a request
        started_s = loop.time()
        arrivals_ms = []
        async for message in stub.Generate(request):
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
