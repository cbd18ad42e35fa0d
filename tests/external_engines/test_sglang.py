"""SGLang servers: the pure functions of their adapter, and recorded servers behind the real gateway."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from external_engines.adapter import lacking
from external_engines.sglang import SGLang
from ops.doctor.examine import diagnose
from pdserve import (
    AsyncClient,
    DeadlineExceeded,
    EventKind,
    Figure,
    InvalidRequest,
    LayoutMismatch,
    NotReady,
    TransferError,
)
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import PdserveError, WorkerLost
from pdserve.core.request import Request
from pdserve.core.sampling import FinishReason, SamplingParams, StructuredOutputs
from tests.external_engines.recorded_sglang import RecordedSGLang, Rooms
from tests.external_engines.recorded_vllm import running, serving
from tests.external_engines.served import EXPECTED, PROMPT, Service, gateway_before, service_of

SGLANG = SGLang()


def request(output: tuple[int, ...] = (), **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=10, seed=7, **sampling)
    return Request("r", (1, 2, 3), params, salt="s", output_token_ids=output, attempt_id="r#1")


def part(tokens: list[int], count: int, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_ids": tokens, "meta_info": {"finish_reason": reason, "completion_tokens": count}}


# --- pure functions ---------------------------------------------------------------------------------------------------


def test_both_requests_of_a_hand_off_are_the_same_but_for_streaming() -> None:
    meeting = SGLANG.meeting("r#1", "host:8998")
    assert meeting is not None
    assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("host", 8998)
    assert 0 <= meeting["bootstrap_room"] < 2**63
    assert meeting != SGLANG.meeting("r#2", "host:8998")
    prefill, decode = SGLANG.prefill(request(), "m", meeting), SGLANG.decode(request(), "m", meeting)
    assert prefill == decode | {"stream": False}
    assert decode == {**SGLANG.alone(request(), "m"), **meeting}


def test_every_parameter_is_sent() -> None:
    body = SGLANG.alone(request(temperature=0.5, stop_token_ids=(9,), logit_bias={4: 1.0}), "m")
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("r#1", [1, 2, 3], "s")
    expected = {
        "temperature": 0.5, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "sampling_seed": 7, "ignore_eos": False,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [9],
        "logit_bias": {"4": 1.0}, "max_new_tokens": 10,
    }  # fmt: skip
    assert body["sampling_params"] == expected


def test_a_retry_continues_after_the_tokens_so_far() -> None:
    body = SGLANG.alone(request(output=(8, 9)), "m")
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([1, 2, 3, 8, 9], 8)


def test_what_it_lacks_is_refused_by_name() -> None:
    def lacks(**sampling: Any) -> str:
        return lacking(SGLANG.abilities, request(**sampling)).partition(":")[0]

    json_schema = StructuredOutputs("json", '{"type": "object"}')
    assert lacks(logprobs=2) == "logprobs"
    assert lacks(prompt_logprobs=0).startswith("prompt_logprobs")
    assert lacks(speculation=True) == "speculation"
    assert lacks(structured_outputs=StructuredOutputs("grammar", 'start: "a"')) == "structured_outputs"
    assert lacks(structured_outputs=json_schema, output=(4,)) == "structured_outputs"
    assert lacks(structured_outputs=json_schema) == lacks() == ""
    asked = SGLANG.alone(request(structured_outputs=json_schema), "m")["sampling_params"]
    assert asked["json_schema"] == json_schema.text


@pytest.mark.parametrize(
    ("said", "start", "reason"),
    [
        (part([7, 8, 9], 3), 0, None),  # all so far
        (part([7, 8, 9, 10], 3), 0, None),  # and one that came while the part was written
        (part([9], 3), 2, None),  # the last ones
        (part([9], 3, {"type": "length", "length": 3}), 2, FinishReason.LENGTH),
        (part([9], 3, {"type": "stop", "matched": 9}), 2, FinishReason.STOP),
        (part([], 0), 0, None),
    ],
)
def test_reading_a_part(said: dict[str, Any], start: int, reason: FinishReason | None) -> None:
    step = SGLANG.read(said)
    assert ([token for token, _ in step.tokens], step.start) == (said["output_ids"], start)
    assert step.finish_reason is reason


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, InvalidRequest),
        ({"error": {"message": "broken"}}, WorkerLost),
        (part([], 0, {"type": "abort", "message": "too long", "status_code": 400}), InvalidRequest),
        (part([], 0, {"type": "abort", "message": "KVTransferError: it broke", "status_code": 500}), TransferError),
        (part([], 0, {"type": "abort"}), WorkerLost),
    ],
)
def test_reading_an_error(said: dict[str, Any], kind: type[PdserveError]) -> None:
    with pytest.raises(kind):
        SGLANG.read(said)


@pytest.mark.parametrize("said", [{}, {"meta_info": {}}, {"meta_info": None, "output_ids": []}, {"output_ids": [1]}])
def test_reading_what_is_no_answer(said: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        SGLANG.read(said)


# --- behind the gateway -----------------------------------------------------------------------------------------------


def service(*settings: tuple[str, object], **faults: object) -> AbstractAsyncContextManager[Service[RecordedSGLang]]:
    """A gateway before two servers, 1P1D. ``faults`` are attributes of ``prefill`` or ``decode``."""
    rooms: Rooms = {}
    prefill, decode = RecordedSGLang("prefill", rooms), RecordedSGLang("decode", rooms)
    return service_of(prefill, decode, *settings, **faults)


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_hand_off(incremental: bool) -> None:
    async with service(decode_incremental=incremental) as served:
        result = await served.generate("auto")
        assert list(result.token_ids) == EXPECTED
        assert (result.prefill_worker, result.decode_worker) == ("prefill-0", "decode-0")
        (first,), (second,) = served.prefill.requests, served.decode.requests
        assert first == second | {"stream": False}
        assert first["bootstrap_port"] == served.prefill.bootstrap_port
        assert EventKind.DECODE_SENT not in {event.kind for event in result.events}
        stages = result.breakdowns[Figure.TTFT_DECODE].stages_ms
        assert {"prefill_leg", "decode_leg", "first_decode"} <= set(stages)
        assert "leg_gap" not in stages
        assert result.kv_bytes == 0  # not known
        assert not served.gateway.status().notes
        workers = {worker.worker_id: worker for worker in served.gateway.status().workers}
        assert {worker.device for worker in workers.values()} == {"sglang"}
        assert workers["prefill-0"].kv_addresses["sglang"] == "127.0.0.1:8998"


async def test_one_token_needs_both_servers_too() -> None:
    async with service() as served:
        assert list((await served.generate(max_tokens=1)).token_ids) == EXPECTED[:1]
        assert len(served.decode.requests) == 1


async def test_token_1_is_held_back_where_that_is_configured() -> None:
    async with service(("router.first_token", "decode")) as served:
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_a_request_for_one_worker_is_refused() -> None:
    async with service() as served:
        await served.generate()
        with pytest.raises(NotReady, match="serve requests in pairs; use mode pd"):
            await served.generate("colocated", timeout_s=2.0)


async def test_a_transfer_that_fails_is_tried_again_with_both_servers() -> None:
    async with service(decode_loses_kv=True) as served:
        with pytest.raises(TransferError, match="Decode transfer failed"):
            await served.generate()
        assert len(served.decode.requests) == len(served.prefill.requests) > 1
        served.decode.loses_kv = False
        await asyncio.sleep(1.1)  # the breaker's pause
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_an_answer_that_breaks_off_is_continued() -> None:
    async with service(decode_breaks_after=4) as served:
        assert list((await served.generate()).token_ids) == EXPECTED
        assert served.prefill.requests[-1]["input_ids"] == [*PROMPT, *EXPECTED[:4]]


async def test_a_server_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async with service(decode_hangs=True) as served:
        with pytest.raises(DeadlineExceeded):
            await served.generate(timeout_s=0.5)
        served.decode.hangs = False
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_a_client_that_leaves_closes_both_requests() -> None:
    async with service() as served:
        await served.gateway.wait_serving(20.0)
        stream = served.client.generate(PROMPT, max_tokens=300, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        await served.until(lambda: bool(served.decode.cancelled) and not served.decode.running)


@pytest.mark.parametrize(("attribute", "value"), [("version", "0.5.8"), ("page_size", 64)])
async def test_servers_that_differ_are_no_pair(attribute: str, value: object) -> None:
    async with service(**{f"decode_{attribute}": value}) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match=f"{value}"):
            await served.client.generate(PROMPT, max_tokens=8, timeout_s=5.0).result()


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ({"decode_mode": "prefill"}, "decode-0: it was started as a prefill server, and is named as a decode server"),
        ({"decode_has_metrics": False}, "decode-0: it shows no metrics; start it with --enable-metrics"),
    ],
)
async def test_a_server_that_cannot_be_used_is_noted(fault: dict[str, Any], note: str) -> None:
    async with service(**fault) as served:
        await served.until(lambda: note in " ".join(served.gateway.status().notes))


async def test_a_plain_server_is_the_colocated_arm() -> None:
    """It serves alone, beside a pair, and is in no pair itself."""
    plain, rooms = RecordedSGLang("null"), Rooms()
    prefill, decode = RecordedSGLang("prefill", rooms), RecordedSGLang("decode", rooms)
    async with serving(plain, prefill, decode):
        urls = {"cluster.prefill_urls": [plain.url, prefill.url], "cluster.decode_urls": [decode.url]}
        gateway = gateway_before(plain.url, decode.url, **{"router.heartbeat_s": 0.05, **urls})
        await gateway.start()
        try:
            async with AsyncClient(f"127.0.0.1:{gateway.port}") as client:
                served = Service(gateway, client, prefill, decode)
                await served.until(lambda: len(gateway.registry.workers) == 3)
                results = [await served.generate(mode) for mode in ("pd", "colocated") for _ in range(3)]
        finally:
            await gateway.stop(0.0)
    assert {tuple(result.token_ids) for result in results} == {tuple(EXPECTED)}
    assert {result.prefill_worker for result in results[:3]} == {"prefill-1"}
    assert len(plain.requests) == len(prefill.requests) == len(decode.requests) == 3


def test_the_doctor_asks_the_servers() -> None:
    rooms: Rooms = {}
    prefill, decode = RecordedSGLang("prefill", rooms), RecordedSGLang("decode", rooms)
    with running(prefill, decode):
        urls = {"cluster.prefill_urls": [prefill.url], "cluster.decode_urls": [decode.url]}
        findings = diagnose(PdserveConfig.load(None, urls)).findings
        assert [finding.level for finding in findings] == ["ok", "ok"]
        prefill.mode = "null"
        (finding,) = [each for each in diagnose(PdserveConfig.load(None, urls)).findings if each.level == "warn"]
        assert "it was not started to hand KV over" in finding.what
        prefill.mode = "decode"
        (finding,) = [each for each in diagnose(PdserveConfig.load(None, urls)).findings if each.level == "fail"]
        assert "started as a decode server" in finding.what


def test_the_body_is_json() -> None:
    meeting = SGLANG.meeting("r#1", "[::1]:8998")
    assert meeting is not None
    assert msgspec.json.decode(msgspec.json.encode(SGLANG.prefill(request(), "m", meeting)))
    assert meeting["bootstrap_host"] == "::1"
