"""A generation that is silent for long, through something that forgets silent connections."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from gateway.grpc_api import server_options
from pdserve import AsyncClient
from pdserve.client import channel
from pdserve.client.channel import CHANNEL_OPTIONS
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.gateway.conftest import PATIENT, Service, StartService
from tests.gateway.idle_proxy import IdleProxy

IDLE_S = 2.5
SILENT_S = 6.0
PING_S = 1.0  # gRPC sends no more than one a second
PROMPT = [5, 6, 7]
OPTIONS = dict(CHANNEL_OPTIONS)


async def tokens_of(target: str, options: list[tuple[str, int]] | None = None, timeout_s: float = 60.0) -> int:
    """The number of tokens that a stock client gets."""
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(max_tokens=2))
        return len([m async for m in stub.Generate(request, timeout=timeout_s) if m.HasField("token")])


async def test_pings_of_either_end_keep_a_silent_generation(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_options, "CLIENT_PINGS_EVERY_S", server_options.LATE_S + PING_S / 2)
    quiet = await start_service("p0", "d0", router=PATIENT)
    monkeypatch.setattr(server_options, "PING_EVERY_S", PING_S)
    pinging = await start_service("p0", "d0", router=PATIENT)
    own = {**OPTIONS, "grpc.keepalive_time_ms": round(PING_S * 1e3)}
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", list(own.items()))
    for service in (quiet, pinging):
        service.fleet["p0"].delay_s = {"prefill": SILENT_S}
        service.fleet["d0"].delay_s = {"run": SILENT_S}
    async with (
        IdleProxy(quiet.gateway.port, IDLE_S) as to_quiet,
        IdleProxy(pinging.gateway.port, IDLE_S) as to_pinging,
    ):

        async def with_own_client() -> int:
            async with AsyncClient(to_quiet.target) as client:
                return len((await client.generate(PROMPT, max_tokens=2, timeout_s=60).result()).token_ids)

        with_server, with_client, with_neither = await asyncio.gather(
            tokens_of(to_pinging.target), with_own_client(), tokens_of(to_quiet.target), return_exceptions=True
        )
        assert (with_server, with_client) == (2, 2)
        assert isinstance(with_neither, grpc.aio.AioRpcError)
        assert (to_pinging.forgotten, to_quiet.forgotten) == (0, 1)


def test_what_clients_send_is_what_the_server_permits() -> None:
    served = dict(server_options.server_options(2**20))
    assert OPTIONS["grpc.keepalive_time_ms"] >= server_options.CLIENT_PINGS_EVERY_S * 1e3
    assert served["grpc.http2.min_ping_interval_without_data_ms"] < server_options.CLIENT_PINGS_EVERY_S * 1e3


@pytest.mark.soak
async def test_pings_as_often_as_documented_for_a_minute(service: Service) -> None:
    for worker in service.fleet.values():
        worker.delay_s = {"prefill": 65.0, "run": 65.0}
    options = [
        ("grpc.keepalive_time_ms", round(server_options.CLIENT_PINGS_EVERY_S * 1e3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with IdleProxy(service.gateway.port, 25.0) as proxy:
        assert await tokens_of(proxy.target, options, timeout_s=120) == 2
        assert proxy.forgotten == 0
