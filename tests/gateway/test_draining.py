"""A draining gateway refuses new requests and finishes those in progress, with retries."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.errors import ERROR_KIND_KEY
from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import StartService

PROMPT = pb.TokenIds(ids=[5, 6, 7])


async def test_draining_refuses_new_requests_and_finishes_the_others(start_service: StartService) -> None:
    service = await start_service("p0", "d0")
    service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=2)))
    await service.until(lambda: service.fleet["p0"].requests)
    assert service.gateway.drain() == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.generate(token_ids=PROMPT)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "is being stopped" in (refused.value.details() or "")
    assert (ERROR_KIND_KEY, "NotReady") in tuple(refused.value.trailing_metadata() or ())
    health = health_pb2_grpc.HealthStub(service.channel)
    checked = await health.Check(health_pb2.HealthCheckRequest())
    assert checked.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not (await service.stub.GetStatus(pb.GetStatusRequest())).ready
    assert service.gateway.drain() == 1, "the refused one does not count"

    # The worker it is on fails: the retry is part of the draining.
    service.make("d1")
    await service.beat("d1")
    await service.until(lambda: service.gateway.registry.get("d1"))
    service.fleet["d0"].crash()
    tokens, _ = await running
    assert len(tokens) == 2
    await service.until(lambda: service.gateway.drain() == 0)


async def test_requests_cut_off_by_a_stop_are_unavailable(start_service: StartService) -> None:
    service = await start_service("p0", "d0")
    service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate(token_ids=PROMPT))
    await service.until(lambda: service.fleet["p0"].requests)
    assert service.gateway.drain() == 1
    await service.gateway.stop(0.0)
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await running
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
