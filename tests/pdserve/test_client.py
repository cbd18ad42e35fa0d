"""Both clients against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any, TypeVar

import pytest

from pdserve import AsyncClient, Client, EventKind, Generation, TopLogprob
from pdserve.core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LaunchError,
    LayoutMismatch,
    NotReady,
    PdserveError,
    RequestAborted,
    WorkerLost,
)
from pdserve.core.timeline import Figure
from pdserve.pb import inference_pb2 as pb
from tests.pdserve.scripted_service import BLOCK_SIZE, KV_BYTES_PER_TOKEN, PREFILL_S, ScriptedService

E = TypeVar("E", bound=PdserveError)

STATUSES = [
    ("INVALID_ARGUMENT", InvalidRequest),
    ("RESOURCE_EXHAUSTED", CapacityExceeded),
    ("UNAVAILABLE", NotReady),
    ("DEADLINE_EXCEEDED", DeadlineExceeded),
    ("CANCELLED", NotReady),
    ("FAILED_PRECONDITION", LaunchError),
    ("INTERNAL", PdserveError),
    ("UNIMPLEMENTED", PdserveError),
]

ISSUE_KEYS = [
    *("request_id", "text", "token_ids", "finish_reason", "mode", "prefill_worker", "decode_worker", "transport"),
    *("block_size", "kv_bytes", "kv_bytes_expected", "kv_blocks_sent", "kv_blocks_skipped"),
    *("prefill_cached_tokens", "draft_tokens", "accepted_draft_tokens", "prefix_fetch"),
    *("ttft_ms", "ttft_decode_ms", "breakdown_ms", "clock_error_ms", "itl_ms", "transfer"),
    *("prompt_tokens", "attempts", "placements", "failures", "resumes"),
    *("tpot_ms", "total_ms", "tokens", "events", "clocks"),
]


def free_target() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return f"localhost:{listener.getsockname()[1]}"


async def refused(target: str, prompt: str, kind: type[E], **options: Any) -> E:
    """The error of a request, which both clients raise alike."""
    with Client(target) as client, pytest.raises(kind) as error:
        await asyncio.to_thread(client.generate(prompt, **options).result)
    async with AsyncClient(target) as async_client:
        with pytest.raises(kind) as async_error:
            await async_client.generate(prompt, **options).result()
    assert type(error.value) is type(async_error.value) is kind
    assert str(error.value) == str(async_error.value)
    return async_error.value


def check_generation(generation: Generation) -> None:
    assert generation.finish_reason == "length"
    assert generation.mode == "pd"
    assert (generation.prefill_worker, generation.decode_worker) == ("prefill-0", "decode-0")
    assert generation.prompt_tokens == 20
    assert generation.kv_bytes == generation.kv_bytes_expected == 2 * BLOCK_SIZE * KV_BYTES_PER_TOKEN
    assert generation.kv_blocks_sent == 2
    assert [str(failed) for failed in generation.failures] == ["decode-1: WorkerLost: it is gone"]
    assert generation.transfer.checksum == "xxh3-64 verified"
    assert generation.clock_error_ms == max(b.clock_error_ms for b in generation.breakdowns.values()) > 0
    assert generation.ttft_decode_ms is not None
    assert PREFILL_S * 1e3 <= generation.ttft_ms < generation.ttft_decode_ms
    assert len(generation.itl_ms) == 4
    assert generation.itl_ms[0] == pytest.approx(generation.ttft_decode_ms - generation.ttft_ms)
    for figure in Figure:
        breakdown = generation.breakdowns[figure]
        assert breakdown.total_ms == generation.figure_ms(figure)
        assert sum(breakdown.stages_ms.values()) == pytest.approx(breakdown.total_ms)
        assert breakdown.stages_ms["prefill"] >= PREFILL_S * 1e3
        assert next(iter(breakdown.stages_ms)) == "network"
        assert list(breakdown.stages_ms)[-1] == "unattributed"


def test_sync_stream_and_result(service: ScriptedService) -> None:
    with Client(service.target) as client:
        stream = client.generate(list(range(20)), max_tokens=5, seed=7, stop="END", stop_token_ids=[3], request_id="me")
        tokens = [next(stream), next(stream), *stream]  # `next` is not a loop: nothing is cancelled in between
        generation = stream.result()
    assert [token.index for token in tokens] == [0, 1, 2, 3, 4]
    assert tuple(token.token_id for token in tokens) == generation.token_ids
    assert "".join(token.text for token in tokens) == generation.text
    assert [t.arrived_s for t in tokens] == sorted(t.arrived_s for t in tokens)
    assert generation.request_id == "me"
    check_generation(generation)
    asked = service.servicer.requests[0]
    assert list(asked.token_ids.ids) == list(range(20))
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (5, 7)
    assert (list(asked.sampling.stop), list(asked.sampling.stop_token_ids)) == (["END"], [3])
    assert not asked.sampling.HasField("temperature")


async def test_async_stream_and_result(service: ScriptedService) -> None:
    async with AsyncClient(service.target) as client:
        await client.connect()
        async with client.generate("x" * 20, max_tokens=5, mode="pd") as stream:
            tokens = [token async for token in stream]
            generation = await stream.result()
        assert tuple(token.token_id for token in tokens) == generation.token_ids
        check_generation(generation)
        several = await asyncio.gather(*(client.generate(f"prompt {i}").result() for i in range(8)))
    assert len({generation.token_ids for generation in several}) == 8
    assert service.servicer.requests[0].mode == pb.MODE_PD


def test_to_dict_has_the_documented_keys_in_order(service: ScriptedService) -> None:
    with Client(service.target) as client:
        pd = json.loads(json.dumps(client.generate([1, 2, 3], max_tokens=3).result().to_dict()))
        one = client.generate([1], max_tokens=1, mode="colocated").result()
    assert list(pd) == ISSUE_KEYS
    assert list(pd["breakdown_ms"]) == ["ttft", "ttft_decode"]
    assert one.ttft_decode_ms is None
    assert one.to_dict()["breakdown_ms"]["ttft_decode"] is None
    assert one.tpot_ms is None
    assert one.kv_bytes == one.kv_bytes_expected == 0


def test_the_raw_timeline_is_public_and_a_table(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(service.target) as client:
        result = client.generate([1, 2, 3], max_tokens=3).result()
    kinds = [event.kind for event in result.events]
    assert kinds[0] is EventKind.RECEIVED
    assert kinds.index(EventKind.TOKEN_1_SAMPLED) < kinds.index(EventKind.TOKEN_1_EMITTED)
    assert set(result.clocks) == {"prefill-0", "decode-0"}
    plain = result.to_dict()
    assert [event["kind"] for event in plain["events"]] == kinds
    assert plain["clocks"]["decode-0"] == {"offset_s": 0.0, "error_s": 0.0001}
    assert [token["token_id"] for token in plain["tokens"]] == list(result.token_ids)
    # A stage computed from the raw events is the breakdown's. Here all clocks are the same.
    at_s = {event.kind: event.time_s for event in result.events}
    prefill_ms = (at_s[EventKind.TOKEN_1_SAMPLED] - at_s[EventKind.PREFILL_SCHEDULED]) * 1e3
    assert prefill_ms == pytest.approx(result.breakdowns[Figure.TTFT].stages_ms["prefill"])

    table = result.to_dataframe()
    assert list(table["event"]) == [event.kind for event in result.events]
    assert set(table["request_id"]) == {result.request_id}
    assert table["gateway_ms"].iloc[0] == 0.0
    assert table["gateway_ms"].is_monotonic_increasing
    assert set(table["clock_error_ms"]) == {0.0, 0.0001 * 1e3}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError):
        result.to_dataframe()


def test_sampling_options_are_sent_as_given(service: ScriptedService) -> None:
    with Client(service.target) as client:
        client.generate(
            "x",
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0,
            logit_bias={7: -100, 9: 2.5},
        ).result()
        client.generate("x", structured_outputs={"choice": ["a", 'b"']}).result()
        with pytest.raises(InvalidRequest, match=r"^structured_outputs: type: unknown; give one of json, .* SCHEMA}$"):
            client.generate("x", structured_outputs={"type": "object"})
    sent = service.servicer.requests[0].sampling
    assert (sent.min_p, sent.repetition_penalty, sent.presence_penalty) == (0.25, 1.5, -0.5)
    assert sent.HasField("frequency_penalty")
    assert dict(sent.logit_bias) == {7: -100.0, 9: 2.5}
    assert not sent.HasField("logprobs")
    assert not sent.HasField("structured_outputs")
    assert service.servicer.requests[1].sampling.structured_outputs.grammar == r'start: "a" | "b\""'


def test_logprobs_are_in_the_tokens_and_the_json(service: ScriptedService) -> None:
    with Client(service.target) as client:
        stream = client.generate([1, 2, 3], max_tokens=3, logprobs=2)
        streamed = tuple(stream)
        generation = stream.result()
    assert generation.tokens == streamed
    assert all(token.logprob == -0.5 for token in streamed)
    assert streamed[0].top_logprobs == (TopLogprob(0, "t0", -1.0), TopLogprob(1, "t1", -2.0))
    plain = json.loads(json.dumps(generation.to_dict()))
    assert list(plain) == [*ISSUE_KEYS, "logprobs"]
    assert [entry["token_id"] for entry in plain["logprobs"]] == list(generation.token_ids)
    assert plain["logprobs"][0]["top"][1] == {"token_id": 1, "text": "t1", "logprob": -2.0}


@pytest.mark.parametrize(
    ("code", "named", "kind"),
    [
        *[(code, "", kind) for code, kind in STATUSES],
        # The class that the service names goes first.
        ("FAILED_PRECONDITION", "LayoutMismatch", LayoutMismatch),
        ("UNAVAILABLE", "WorkerLost", WorkerLost),
        ("RESOURCE_EXHAUSTED", "AnErrorOfALaterVersion", CapacityExceeded),
        ("CANCELLED", "RequestAborted", NotReady),  # not by this client
    ],
)
async def test_each_status_becomes_its_error_in_both_clients(
    service: ScriptedService, code: str, named: str, kind: type[PdserveError]
) -> None:
    prompt = f"{f'raise {code} {named}' if named else f'fail {code}'} the pool is on fire"
    assert "the pool is on fire" in str(await refused(service.target, prompt, kind))
    async with AsyncClient(service.target) as client:
        stream = client.generate(prompt)
        for _ in range(2):
            with pytest.raises(kind):
                await anext(stream)


async def test_a_stream_without_completion_is_an_error(service: ScriptedService) -> None:
    assert "without its completion" in str(await refused(service.target, "broken", PdserveError))


async def test_deadline(service: ScriptedService) -> None:
    with Client(service.target) as client:
        stream = client.generate("hang", timeout_s=0.2)
        assert next(stream).text == "a"
        with pytest.raises(DeadlineExceeded):
            next(stream)
    async with AsyncClient(service.target) as async_client:
        with pytest.raises(DeadlineExceeded):
            await async_client.generate("hang", timeout_s=0.2).result()


async def test_one_token_of_a_loop_is_no_loop(service: ScriptedService) -> None:
    with Client(service.target) as client:
        assert next(iter(client.generate("hello"))).index == 0
    async with AsyncClient(service.target) as async_client:
        assert (await anext(aiter(async_client.generate("hello")))).index == 0


async def test_two_readers_share_one_request(service: ScriptedService) -> None:
    """Whichever comes first starts it, and both see its end."""
    with Client(service.target) as client:
        stream = client.generate("hello", max_tokens=5)
        first, second = await asyncio.gather(*(asyncio.to_thread(stream.result) for _ in range(2)))
        assert first is second
    async with AsyncClient(service.target) as async_client:
        async_stream = async_client.generate("hello", max_tokens=5)
        first, second = await asyncio.gather(async_stream.result(), async_stream.result())
        assert first is second
    assert len(service.servicer.requests) == 2


async def test_streams_that_begin_together_connect_once(service: ScriptedService) -> None:
    with Client(service.target) as client:
        await asyncio.gather(*(asyncio.to_thread(client.generate(f"prompt {i}").result) for i in range(16)))
        assert service.health.checks == 1
        client.connect()  # when it is asked for by itself, it is done
        assert service.health.checks == 2


async def test_a_closed_client_says_so(service: ScriptedService) -> None:
    calls = ("status", "ready", "connect", "wait_ready")
    client, async_client = Client(service.target), AsyncClient(service.target)
    unused, async_unused = client.generate("x"), async_client.generate("x")
    client.close()
    await async_client.close()
    for use in (unused.result, *(getattr(client, call) for call in calls)):
        with pytest.raises(RequestAborted, match="was closed"):
            use()
    for use in (async_unused.result, *(getattr(async_client, call) for call in calls)):
        with pytest.raises(RequestAborted, match="was closed"):
            await use()


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_given_up_while_connecting(leave: str) -> None:
    """A listener that says nothing: the client waits for its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(target) as client:
            stream = client.generate("x", timeout_s=4.0)
            reading = asyncio.create_task(asyncio.to_thread(stream.result))
            await asyncio.sleep(0.1)
            (client.close if leave == "close" else stream.cancel)()
            with pytest.raises(RequestAborted, match="cancelled by the client"):
                await reading
        async with AsyncClient(target) as async_client:
            async_stream = async_client.generate("x", timeout_s=4.0)
            reading = asyncio.create_task(async_stream.result())
            await asyncio.sleep(0.1)
            if leave == "close":
                await async_client.close()
            else:
                async_stream.cancel()
            with pytest.raises(RequestAborted, match="cancelled by the client"):
                await reading


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (5, {}, "prompt"),
        (["a"], {}, "prompt"),
        ([-1], {}, "prompt"),
        (b"bytes", {}, "prompt"),
        ("\ud800", {}, "prompt"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"frequency_penalty": "much"}, "frequency_penalty"),
        ("x", {"logit_bias": [1]}, "logit_bias"),
        ("x", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("x", {"structured_outputs": "a"}, "structured_outputs"),
        ("x", {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ("x", {"structured_outputs": {"json": {1, 2}}}, "structured_outputs"),
        ("x", {"structured_outputs": {"json_object": True}, "ignore_eos": True}, "ignore_eos"),
        ("x", {"structured_outputs": {"json_object": True}, "logit_bias": {1: 100}}, "logit_bias"),
        ("x", {"mode": "sideways"}, "mode"),
        ("x", {"timeout_s": 0}, "timeout_s"),
        ("x", {"maxtokens": 3}, "maxtokens"),
    ],
)
def test_wrong_fields_are_named_without_a_round_trip(prompt: Any, options: Any, field: str) -> None:
    with Client(free_target()) as client, pytest.raises(InvalidRequest, match=f"^{field}: "):
        client.generate(prompt, **options)


async def test_nothing_listening_is_said_with_the_target() -> None:
    target = free_target()
    with Client(target) as client:
        with pytest.raises(NotReady, match=target):
            client.generate("x").result()
        assert not client.ready()
        with pytest.raises(NotReady, match="not ready within"):
            client.wait_ready(0.3)
    async with AsyncClient(target) as async_client:
        with pytest.raises(NotReady, match="pdserve up"):
            await async_client.generate("x").result()
        with pytest.raises(NotReady, match="not ready within"):
            await async_client.wait_ready(0.3)


async def test_status_and_health(service: ScriptedService) -> None:
    with Client(service.target) as client:
        status = client.status()
        assert client.ready()
        client.wait_ready(1)
    assert status.ready
    assert status.idle
    assert status.used_blocks == 0
    assert [worker.role for worker in status.workers] == ["prefill", "decode"]
    assert [link.worker_id for link in status.workers[0].links] == ["decode-0"]
    service.set_serving(False)
    async with AsyncClient(service.target) as async_client:
        assert await async_client.status() == status
        assert not await async_client.ready()
        asyncio.get_running_loop().call_later(0.2, service.set_serving, True)
        await async_client.wait_ready(5)


def test_every_exported_name_exists() -> None:
    import pdserve

    assert all(getattr(pdserve, name) for name in pdserve.__all__)
    assert set(pdserve.__all__) <= set(dir(pdserve))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pdserve.nothing
