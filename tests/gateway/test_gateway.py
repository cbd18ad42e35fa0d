from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from contract.control import Beat
from contract.message import encode
from gateway.gateway import Gateway
from gateway.grpc_api.inference_servicer import SERVICE
from pdserve.client.status import ServiceStatus
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import LaunchError, NotReady
from pdserve.core.worker import WorkerLoad
from pdserve.pb import inference_pb2 as pb
from router.cost_model import MIN_SAMPLES
from tests.fake_worker import FakeWorker
from tests.gateway.conftest import PROMPT, Service, StartService, call_error, fake_model, settle
from tests.gateway.test_generate import refused
from tests.loopback import SECRET


async def health_of(service: Service, name: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(service.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_health_follows_the_first_pair_and_its_loss(start_service: StartService) -> None:
    service = await start_service()
    assert await health_of(service) == "NOT_SERVING"
    assert (await call_error(service)).code() is grpc.StatusCode.UNAVAILABLE
    service.make("p0")
    await service.beat("p0")
    await settle()
    assert await health_of(service) == "NOT_SERVING"
    error = await call_error(service)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode worker is ready" in (error.details() or "")
    await service.bring_up("d0")
    assert [await health_of(service, name) for name in ("", SERVICE)] == ["SERVING", "SERVING"]
    service.fleet["d0"].crash()
    await settle()
    assert await health_of(service) == "SERVING", "mode auto needs any ready worker"
    service.fleet["p0"].crash()
    await settle()
    assert await health_of(service) == "NOT_SERVING"


async def test_a_restarted_gateway_of_one_role_refuses_only_hand_offs_at_once(start_service: StartService) -> None:
    service = await start_service(restarted=True, cluster={"prefill": 0, "decode": 1})
    assert (await call_error(service, pb.MODE_PD)).code() is grpc.StatusCode.UNAVAILABLE
    waiting = asyncio.create_task(service.generate(max_tokens=2))
    await service.until(lambda: service.gateway._inference._being_read.total() == 1)
    await service.bring_up("d0")
    tokens, completion = await waiting
    assert (len(tokens), completion.attempts) == (2, 1)


async def test_the_gateways_loops_log_bugs_and_continue(
    start_service: StartService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await start_service(router={"heartbeat_s": 0.01})
    registry = service.gateway.registry
    with monkeypatch.context() as broken:
        broken.setattr(registry, "expire", lambda: 1 // 0)
        broken.setattr(registry, "unavailable", lambda mode: 1 // 0)
        service.make("p0")
        await service.beat("p0")
        await service.until(lambda: "unexpected error while watching heartbeats" in caplog.text)
        await service.until(lambda: "unexpected error while updating the service's health" in caplog.text)
    await service.bring_up("p0", "d0")
    assert await health_of(service) == "SERVING"


async def test_reflection_is_all_that_a_call_needs(service: Service) -> None:
    """A client that knows the address and a method's name, and has no generated code."""

    def call() -> tuple[Any, list[str]]:
        with grpc.insecure_channel(f"127.0.0.1:{service.gateway.port}") as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            method = pool.FindServiceByName("pdserve.v1.Inference").FindMethodByName("GetStatus")
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            ask = channel.unary_unary(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            status: Any = ask(request(), timeout=5)
            return status, [field.name for field in method.output_type.fields]

    status, fields = await asyncio.to_thread(call)
    assert not isinstance(status, pb.GetStatusResponse)
    assert (status.ready, status.model) == (True, "fake")
    assert [worker.worker_id for worker in status.workers] == ["d0", "p0"]
    assert fields == [field.name for field in pb.GetStatusResponse.DESCRIPTOR.fields]


async def test_status_tells_the_settings(start_service: StartService) -> None:
    service = await start_service("p0", "d0", engine={"chunk_tokens": "off", "offload_folder": "/kv"})
    answer = await service.stub.GetStatus(pb.GetStatusRequest())
    settings = ServiceStatus.from_proto(answer).settings
    assert (settings["engine.chunk_tokens"], settings["engine.num_blocks"]) == ("off", None)
    assert settings["router.slo"] == {"ttft_ms": None, "itl_ms": None}
    assert "/kv" not in str(answer)


async def test_status_says_what_completed_requests_have_taught(service: Service) -> None:
    for count in range(MIN_SAMPLES):
        assert not (await service.stub.GetStatus(pb.GetStatusRequest())).costs, count
        await service.generate(max_tokens=5, mode=pb.MODE_PD)
    prefill, handoff, decode = (await service.stub.GetStatus(pb.GetStatusRequest())).costs
    assert prefill.startswith("prefill on a prefill cpu worker: ")
    assert handoff.startswith("hand-off within a host: ")
    assert decode.startswith("decode on a decode cpu worker: ")
    assert all(f"(from {MIN_SAMPLES} requests)" in line for line in (prefill, handoff, decode))


async def test_status_has_workers_and_model(service: Service) -> None:
    service.fleet["p0"].hangs = {"prefill"}
    call = service.stub.Generate(pb.GenerateRequest(token_ids=PROMPT, sampling=pb.Sampling(max_tokens=7)))
    await service.until(lambda: service.fleet["p0"].requests)
    status = await service.stub.GetStatus(pb.GetStatusRequest())
    assert (status.ready, status.model, status.version) == (True, "fake", "1.2.3")
    assert (status.context_length, status.block_size, status.kv_bytes_per_token) == (256, 4, 128)
    assert (status.dtype, status.model_hash, status.vocab_size) == ("float32", "fake", 1000)
    assert (status.queued, status.running) == (0, 1)
    assert status.uptime_s > 0
    decode, prefill = status.workers
    assert (prefill.worker_id, prefill.role, prefill.state) == ("p0", "prefill", "ready")
    assert [link.worker_id for link in prefill.links] == ["d0"]
    assert (decode.worker_id, decode.free_blocks, decode.num_blocks) == ("d0", 64, 64)
    assert list(decode.transports) == ["loopback"]
    assert (prefill.outstanding_tokens, decode.outstanding_tokens) == (5, 7), "what each has to compute"
    assert 0 <= prefill.heartbeat_age_s < 2
    call.cancel()


async def test_nothing_runs_on_a_lost_worker(service: Service) -> None:
    load = WorkerLoad(free_blocks=60, running=3, waiting=2, others_tokens=40, preemptions=1)
    await service.report(encode(Beat(service.infos["d0"], load, [])))
    for figures in ((3, 2, 40), (0, 0, 0)):
        decode = (await service.stub.GetStatus(pb.GetStatusRequest())).workers[0]
        assert (decode.running, decode.waiting, decode.outstanding_tokens) == figures
        assert (decode.free_blocks, decode.preemptions) == (60, 1)
        service.gateway.registry.lost("d0")


async def test_a_port_in_use_is_named(start_service: StartService) -> None:
    service = await start_service()

    async def never(*_: object) -> FakeWorker:
        raise AssertionError

    port = service.gateway.port
    config = PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": port}})
    second = Gateway(config, model=fake_model(), connect=never, secret=SECRET)
    with pytest.raises(LaunchError, match=rf"^gateway\.port: {port} is in use"):
        await second.start()
    await second.stop()
    taken = Gateway(
        PdserveConfig.parse({"gateway": {"host": "127.0.0.1", "port": 0}}),
        model=fake_model(),
        connect=never,
        secret=SECRET,
        registry_address=service.gateway.registry_address,
    )
    with pytest.raises(LaunchError, match="registry port"):
        await taken.start()
    await taken.stop()


async def test_waiting_for_service_raises_the_reason(start_service: StartService) -> None:
    service = await start_service()
    with pytest.raises(NotReady, match="none has registered"):
        await service.gateway.wait_serving(0.05)


async def test_stopping_drains_within_a_bound(service: Service) -> None:
    service.fleet["d0"].delay_s = {"decode": 0.1}
    running = asyncio.create_task(service.generate(max_tokens=2))
    await service.until(lambda: service.fleet["p0"].requests)
    await service.gateway.stop(2.0)
    tokens, _ = await running
    assert len(tokens) == 2


async def test_stopping_aborts_requests_that_do_not_end(service: Service) -> None:
    service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate())
    await service.until(lambda: service.fleet["p0"].requests)
    await asyncio.wait_for(service.gateway.stop(0.1), 3.0)
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await running
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.fleet["d0"].aborted


async def test_draining_refuses_new_requests_and_finishes_the_others(service: Service) -> None:
    service.fleet["d0"].hangs = {"decode"}
    running = asyncio.create_task(service.generate(max_tokens=2))
    await service.until(lambda: service.fleet["p0"].requests)
    assert service.gateway.drain() == 1
    message, kind = await refused(service, grpc.StatusCode.UNAVAILABLE)
    assert (kind, "is being stopped" in message) == ("NotReady", True)
    assert await health_of(service) == "NOT_SERVING"
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
