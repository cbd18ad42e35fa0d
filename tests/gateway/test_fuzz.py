"""Damaged and random requests over gRPC: each is answered, or refused with a documented status that names the field."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from pdserve.pb import inference_pb2 as pb
from tests.gateway.conftest import Service
from tests.gateway.fuzzing import (
    ANSWER_S,
    CONCURRENCY,
    SAMPLING,
    SEED,
    Draws,
    check_alive,
    ends_soon,
    short_and_soak,
)
from tests.gateway.mutations import Mutator, of_length, varint

GENERATE = "/pdserve.v1.Inference/Generate"
STATUS = "/pdserve.v1.Inference/GetStatus"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT

FULL = pb.Sampling(**SAMPLING, logit_bias={5: -100.0, 7: 2.5}, logprobs=3)
SAMPLES = [
    pb.GenerateRequest(text="the quick brown fox", sampling=pb.Sampling(max_tokens=4)),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 300, 999]), mode=pb.MODE_COLOCATED, salt="tenant"),
    pb.GenerateRequest(request_id="a-1", text="größer 😀", sampling=FULL, mode=pb.MODE_PD),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100)), sampling=FULL),
    pb.GenerateRequest(
        text="x",
        sampling=pb.Sampling(structured_outputs=pb.StructuredOutputs(json='{"type": "object"}'), prompt_logprobs=2),
    ),
]
VALID = SAMPLES[0].SerializeToString()


def serialized(messages: Iterable[Any]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


def field_of(error: Any) -> str:
    """The field that a refusal names in its details."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    named: list[str] = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            named.extend(violation.field for violation in bad.field_violations)
    (field,) = named
    return str(field)


async def outcome(service: Service, method: str, data: bytes) -> grpc.StatusCode:
    """The status of a call with these bytes. A refusal names a field."""
    if method == REFLECTION:
        begin: Any = service.channel.stream_stream(method)
        call = begin(iter([data]), timeout=ANSWER_S)
    else:
        begin = service.channel.unary_stream(method)
        call = begin(data, timeout=ANSWER_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as failure:
        error = failure
    else:
        return OK
    assert error.code() is not INVALID or field_of(error), data
    return error.code()


async def outcomes(service: Service, method: str, mutator: Mutator, count: int) -> Counter[grpc.StatusCode]:
    """The statuses of ``count`` calls with damaged messages, several at a time."""
    found: Counter[grpc.StatusCode] = Counter()
    left = iter(range(count))

    async def send() -> None:
        for _ in left:
            data = mutator.draw()
            code = await outcome(service, method, data)
            found[code] += 1
            assert code in ALLOWED[method], f"{method}: {code} for {data!r}"

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(send())
    return found


ALLOWED = {
    # RESOURCE_EXHAUSTED: never fits.
    GENERATE: {OK, INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED},
    STATUS: {OK, INVALID},
    HEALTH: {OK, INVALID, grpc.StatusCode.NOT_FOUND},
    REFLECTION: {OK, INVALID},
}


@short_and_soak
async def test_damaged_messages(service: Service, draws: Draws, caplog: pytest.LogCaptureFixture) -> None:
    ends_soon(service)
    found = await outcomes(service, GENERATE, Mutator(serialized(SAMPLES), SEED), draws.mutated_grpc)
    assert min(found[OK], found[INVALID]) > draws.mutated_grpc / 50, found
    samples = {
        STATUS: [pb.GetStatusRequest()],
        HEALTH: [health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"), health_pb2.HealthCheckRequest()],
        REFLECTION: [
            reflection_pb2.ServerReflectionRequest(list_services="x"),
            reflection_pb2.ServerReflectionRequest(host="h", file_containing_symbol="pdserve.v1.Inference"),
            reflection_pb2.ServerReflectionRequest(file_by_filename="pdserve/pb/inference.proto"),
        ],
    }
    for method, messages in samples.items():
        mutator = Mutator(serialized(messages), SEED)
        await outcomes(service, method, mutator, max(60, draws.mutated_grpc // 20))
    await check_alive(service)
    assert "unexpected" not in caplog.text.lower()
    assert "Traceback" not in caplog.text


# --- wrong values -----------------------------------------------------------------------------------------------------

NOT_FINITE = [math.nan, math.inf, -math.inf]
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, 257, 2**32 - 1],
    "temperature": [*NOT_FINITE, -1e-30, -1.0, 100.5, 3e38],
    "top_p": [*NOT_FINITE, 0.0, -0.5, 1.001],
    "seed": [2**63, 2**64 - 1],
    "stop": [[""], ["a", ""], ["x"] * 17, ["x" * 1025]],
    "stop_token_ids": [[1000], [1, 2**32 - 1], list(range(1025))],
    "min_p": [*NOT_FINITE, -0.1, 1.001],
    "repetition_penalty": [*NOT_FINITE, 0.0, -1.0, 10.5],
    "presence_penalty": [*NOT_FINITE, -2.001, 2.001],
    "frequency_penalty": [*NOT_FINITE, -2.001, 2.001],
    "logit_bias": [
        *({1: value} for value in (*NOT_FINITE, 100.5, -101.0)),
        {1000: 1.0},
        dict.fromkeys(range(301), 1.0),
    ],
    "logprobs": [21, 2**32 - 1],
    "prompt_logprobs": [21, 2**32 - 1],
    "structured_outputs": [pb.StructuredOutputs(), *(pb.StructuredOutputs(json=text) for text in ("", "{", "[]"))],
    "request_id": ["a b", "é", "x" * 129, "\x00", "a\nb", "../x"],
    "salt": ["é" * 257],
    "session_id": ["é" * 257],
    "mode": [4, 99, -1, 2**31 - 1, -(2**31)],
    "prompt": [[], [1] * 256, [1] * 5000, [1, 1000], [2**32 - 1], "", "x " * 5000, None],
}


def spoil(request: pb.GenerateRequest, field: str, value: Any) -> None:
    """Give ``request`` a wrong value."""
    if field == "prompt":
        request.ClearField("prompt")
        if isinstance(value, str):
            request.text = value
        elif value is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(value)
        return
    part: Any = request.sampling if field in pb.Sampling.DESCRIPTOR.fields_by_name else request
    part.ClearField(field)
    if isinstance(value, list):
        getattr(part, field).extend(value)
    elif isinstance(value, dict):
        getattr(part, field).update(value)
    elif isinstance(value, pb.StructuredOutputs):
        part.structured_outputs.CopyFrom(value)
    else:
        setattr(part, field, value)


async def test_a_wrong_value_is_refused_by_its_field(service: Service) -> None:
    """In a request whose other fields are right, all of them set."""
    generate: Any = service.stub.Generate
    for field, value in ((field, value) for field, values in WRONG.items() for value in values):
        request = pb.GenerateRequest()
        request.CopyFrom(SAMPLES[2])
        spoil(request, field, value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(request, timeout=ANSWER_S).read()
        assert caught.value.code() is INVALID, (field, value, caught.value)
        assert field_of(caught.value) == field
        assert (caught.value.details() or "").startswith(f"{field}: ")


# --- what was found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (varint(50 << 3) + b"\x01" + VALID, "message"),
        (VALID + varint(1 << 3) + b"\x01", "request_id"),
        (VALID + varint(4 << 3 | 2) + of_length(varint(1 << 3 | 2) + of_length(b"9")), "max_tokens"),
        (VALID + varint(4 << 3 | 2) + of_length(varint(99 << 3) + b"\x01"), "message"),
        (VALID + (varint(99 << 3) + b"\x01") * 100_000, "message"),
        (b"\xff", "message"),
    ],
    ids=["unknown", "wrong type", "wrong type within", "unknown within", "many", "malformed"],
)  # fmt: skip
async def test_fields_that_would_be_ignored_are_refused(service: Service, data: bytes, field: str) -> None:
    generate: Any = service.channel.unary_stream(GENERATE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(data, timeout=ANSWER_S):
            pass
    assert caught.value.code() is INVALID
    assert field_of(caught.value) == field


@pytest.mark.parametrize("method", [STATUS, HEALTH, "/grpc.health.v1.Health/Watch", REFLECTION])
async def test_malformed_messages_of_other_services(
    service: Service, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await outcome(service, method, b"\xff\xff") is INVALID
    assert not caplog.text


async def test_a_compressed_message_counts_as_long_as_it_is(service: Service) -> None:
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{service.gateway.port}", options=[("grpc.max_send_message_length", 2**30)]
    )
    async with channel:
        generate: Any = channel.unary_stream(GENERATE)
        data = pb.GenerateRequest(text="x" * 2**26).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(data, timeout=ANSWER_S, compression=grpc.Compression.Gzip):
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await check_alive(service)
