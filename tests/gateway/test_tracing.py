"""Traces, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from pdserve import AsyncClient
from pdserve.core.timeline import UNATTRIBUTED
from tests.gateway.conftest import Service, StartService

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.spans += [
            span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


async def traced(start_service: StartService, endpoint: str) -> Service:
    gateway = {"host": "127.0.0.1", "port": 0, "otlp_endpoint": endpoint}
    return await start_service("p0", "d0", gateway=gateway, router={"max_attempts": 1})


async def collected(service: Service, collector: Collector) -> dict[str, Span]:
    """The spans by name, after the gateway has sent all of them."""
    tracing = service.gateway._tracing
    assert tracing is not None
    await asyncio.get_running_loop().run_in_executor(None, tracing.close)
    return {span.name: span for span in collector.spans}


async def test_spans_are_the_stages_and_belong_to_the_clients_trace(
    start_service: StartService, collector: tuple[Collector, str]
) -> None:
    service = await traced(start_service, collector[1])
    async with AsyncClient(f"127.0.0.1:{service.gateway.port}") as client:
        result = await client.generate(
            [5] * 9, max_tokens=4, mode="pd", ignore_eos=True, traceparent=f"00-{TRACE}-{PARENT}-01"
        ).result()
    spans = await collected(service, collector[0])
    request = spans["pdserve.request"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    stages = {name.removeprefix("pdserve."): span for name, span in spans.items() if span is not request}
    assert stages.keys() == {
        "gateway", "route", "dispatch", "prefill_queue", "prefill",
        "kv_exposed", "decode_queue", "first_decode", "decode",
    }  # fmt: skip
    assert all(span.parent_span_id == request.span_id for span in stages.values())
    assert len(collector[0].spans) == len(spans) + 2  # gateway and dispatch have two spans each
    breakdown = result.to_dict()["breakdown_ms"]["ttft_decode"]
    for name in ("route", "prefill", "kv_exposed", "first_decode"):
        span = stages[name]
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 == pytest.approx(breakdown[name], abs=0.05)
    assert UNATTRIBUTED not in stages
    attributes = {each.key: each.value for each in request.attributes}
    assert attributes["pdserve.request_id"].string_value == result.request_id
    assert attributes["pdserve.kv.bytes"].int_value == result.kv_bytes
    (worker,) = (each.value.string_value for each in stages["prefill"].attributes)
    assert worker == "p0"


async def test_a_failed_request_has_a_span_with_its_error(
    start_service: StartService, collector: tuple[Collector, str]
) -> None:
    service = await traced(start_service, collector[1])
    async with AsyncClient(f"127.0.0.1:{service.gateway.port}") as client:
        with pytest.raises(Exception, match="prompt"):
            await client.generate([5] * 500).result()
    spans = await collected(service, collector[0])
    assert spans.keys() == {"pdserve.request"}
    status = spans["pdserve.request"].status
    assert status.code == Status.StatusCode.STATUS_CODE_ERROR
    assert status.message.startswith("prompt: ")
