"""What failed calls answer: statuses, and the details of gRPC calls as a client's library reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway.failures import MAX_MESSAGE_BYTES, statuses_of
from pdserve.core.errors import (
    CapacityExceeded,
    InvalidRequest,
    NotReady,
    PdserveError,
    WorkerLost,
    field_of,
)
from pdserve.pb import inference_pb2 as pb
from tests.fake_worker import Point
from tests.gateway.conftest import Service, StartService

DETAILS = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)


STATUS_OF = {
    "PdserveError": ("INTERNAL", 500),
    "ConfigError": ("FAILED_PRECONDITION", 503),
    "ModelError": ("FAILED_PRECONDITION", 503),
    "LaunchError": ("FAILED_PRECONDITION", 503),
    "InvalidRequest": ("INVALID_ARGUMENT", 400),
    "Unauthenticated": ("UNAUTHENTICATED", 401),
    "CapacityExceeded": ("RESOURCE_EXHAUSTED", 400),
    "NotReady": ("UNAVAILABLE", 503),
    "DeadlineExceeded": ("DEADLINE_EXCEEDED", 504),
    "RequestAborted": ("CANCELLED", 499),
    "WorkerLost": ("UNAVAILABLE", 503),
    "TransferError": ("UNAVAILABLE", 503),
    "TransferTimeout": ("UNAVAILABLE", 503),
    "PeerLost": ("UNAVAILABLE", 503),
    "LayoutMismatch": ("FAILED_PRECONDITION", 503),
    "HandOffMissing": ("FAILED_PRECONDITION", 503),
    "TransferRefused": ("UNAVAILABLE", 503),
    "ChecksumMismatch": ("UNAVAILABLE", 503),
}

KINDS = {
    "DuplicateRequest": 409,
    "UnknownModel": 404,
    "UnknownPath": 404,
    "HostNotAllowed": 403,
    "NotAnOperator": 403,
    "UnsupportedMediaType": 415,
    "BodyTooLarge": 413,
    "BodyIncomplete": 408,
}
"""HTTP statuses of kinds of `InvalidRequest`."""


def family(root: type[PdserveError]) -> list[type[PdserveError]]:
    # Only the tree's own: tests elsewhere may have made classes of theirs.
    children = [child for child in root.__subclasses__() if child.__module__ == "pdserve.core.errors"]
    return [root, *(member for child in children for member in family(child))]


def test_every_error_has_the_statuses_that_it_should() -> None:
    found = {kind.__name__: statuses_of(kind("x")) for kind in family(PdserveError)}
    assert {name: (code.name, status) for name, (code, status) in found.items()} == STATUS_OF
    for kind, status in KINDS.items():
        assert statuses_of(InvalidRequest("x", kind=kind)) == (grpc.StatusCode.INVALID_ARGUMENT, status)
    assert statuses_of(CapacityExceeded("x", retry_after_s=1.0)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
    assert statuses_of(ValueError("x")) == (grpc.StatusCode.INTERNAL, 500)


async def details_of(service: Service, **fields: Any) -> tuple[grpc.aio.AioRpcError, dict[str, Any]]:
    """The error of a call that fails, and its details by the names of their types."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generate(**fields)
    # The library checks that status and message are the same as the call's.
    status = rpc_status.from_call(caught.value)
    assert status is not None
    found = {}
    for detail in status.details:
        (kind,) = [kind for kind in DETAILS if detail.Is(kind.DESCRIPTOR)]
        found[kind.__name__] = kind.FromString(detail.value)
    return caught.value, found


async def test_a_full_queue_says_when_to_come_back(start_service: StartService) -> None:
    service = await start_service("p0", "d0", router={"max_queue": 1, "prefill_backlog_tokens": 1})
    service.fleet["p0"].hangs.add("prefill")
    calls = []
    while (router := service.gateway.router).queued < 1:
        known = router.running + router.queued
        calls.append(asyncio.create_task(service.generate(mode=pb.MODE_PD)))
        await service.until(lambda known=known: router.running + router.queued > known)  # type: ignore[misc]
    error, details = await details_of(service, mode=pb.MODE_PD)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert set(details) == {"ErrorInfo", "RetryInfo"}
    metadata: Any = error.trailing_metadata()
    assert dict(metadata)["retry-after-ms"] == str(details["RetryInfo"].retry_delay.ToMilliseconds())
    assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("point", ["decode", "decode_more"])
async def test_other_failures_have_their_class_also_after_tokens(start_service: StartService, point: Point) -> None:
    service = await start_service("p0", "d0", router={"max_attempts": 1})
    service.fleet["d0"].fail(point, WorkerLost("gone: for good"))
    error, details = await details_of(service, mode=pb.MODE_PD)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "gone: for good")
    assert set(details) == {"ErrorInfo"}
    assert details["ErrorInfo"].reason == "WorkerLost"


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (InvalidRequest("top_p: too much: by far"), "top_p"),
        (InvalidRequest("request_id: x", kind="DuplicateRequest"), "request_id"),
        (CapacityExceeded("prompt and max_tokens: too much"), "prompt and max_tokens"),
        (CapacityExceeded("queue: full", retry_after_s=1.0), None),
        (InvalidRequest("no field"), None),
        (NotReady("workers: none"), None),
        (ValueError("x: y"), None),
    ],
)
def test_the_field_is_what_a_refusal_starts_with(error: BaseException, field: str | None) -> None:
    assert field_of(error) == field


@pytest.mark.parametrize("text", ["x" * 100_000, "日本" * 50_000, "\ud800" * 5_000])
async def test_a_long_message_is_cut_before_clients_refuse_it(start_service: StartService, text: str) -> None:
    service = await start_service("p0", "d0", router={"max_attempts": 1})
    service.fleet["p0"].fail("prefill", InvalidRequest(f"field: {text}"))
    error, details = await details_of(service, mode=pb.MODE_PD)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = error.details() or ""
    assert message.endswith("…")
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert details["BadRequest"].field_violations[0].field == "field"
