from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from gateway import admitted_call
from gateway.validation import MAX_PROMPT_LOGPROBS
from pdserve.core.errors import TransferError, WorkerLost
from pdserve.pb import inference_pb2 as pb
from tests.gateway.http_api.conftest import Http, StartHttp

PATH = "/v1/completions"


async def test_an_answer_equals_the_one_over_grpc(http: Http) -> None:
    answer = await http.complete(prompt=[60, 61], max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
    tokens, completion = await http.service.generate(
        token_ids=pb.TokenIds(ids=[60, 61]), sampling=pb.Sampling(max_tokens=4, ignore_eos=True)
    )
    (choice,) = answer["choices"]
    assert choice["text"] == completion.text == "".join(token.text for token in tokens)
    assert choice["token_ids"] == list(completion.token_ids) == [62, 63, 64, 65]
    assert choice["prompt_token_ids"] == [60, 61]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    assert answer["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert "pdserve" not in answer
    http.service.check_idle()


async def test_a_stream_has_an_event_per_token_then_the_end(http: Http) -> None:
    body = {"prompt": "the quick", "max_tokens": 3, "ignore_eos": True}
    whole = await http.complete(**body)
    *events, done = await http.events(PATH, **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    *tokens, usage = map(json.loads, events)
    assert len(tokens) == 3
    assert "".join(token["choices"][0]["text"] for token in tokens) == whole["choices"][0]["text"]
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None, None, "length"]
    assert all("usage" not in token for token in tokens)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len({event["id"] for event in (*tokens, usage)}) == 1


async def test_usage_so_far(http: Http) -> None:
    options = {"continuous_usage_stats": True}
    events = await http.events(PATH, prompt=[5], max_tokens=2, ignore_eos=True, stream_options=options)
    usages = [json.loads(event)["usage"] for event in events[:-1]]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [(1, 1), (1, 2)]


async def test_several_prompts_with_several_outputs(http: Http) -> None:
    answer = await http.complete(prompt=[[60], [70]], n=2, max_tokens=2, ignore_eos=True, return_token_ids=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[61, 62], [61, 62], [71, 72], [71, 72]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 8)
    events = await http.events(
        PATH, prompt=[[60], [70]], n=2, max_tokens=2, ignore_eos=True, return_token_ids=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    streamed: dict[int, list[int]] = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    assert [streamed[index] for index in range(4)] == [choice["token_ids"] for choice in answer["choices"]]
    assert json.loads(events[-2])["usage"] == answer["usage"]
    http.service.check_idle()


async def test_outputs_of_one_prompt_have_seeds_of_their_own(http: Http) -> None:
    await http.complete(prompt=[60], n=3, seed=2**63 - 2, max_tokens=2, ignore_eos=True)
    seeds = [request.sampling.seed for call, request in http.service.fleet["p0"].requests if call == "push"]
    assert sorted(seed for seed in seeds if seed is not None) == [0, 2**63 - 2, 2**63 - 1]


async def test_echo(http: Http) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    plain = await http.complete(prompt="the quick", **body)
    echoed = await http.complete(prompt="the quick", echo=True, **body)
    assert echoed["choices"][0]["text"] == "the quick" + plain["choices"][0]["text"]
    events = await http.events(PATH, prompt="the quick", echo=True, **body)
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == echoed["choices"][0]["text"]


async def test_an_echo_with_log_probabilities(http: Http) -> None:
    body: dict[str, Any] = {"prompt": "the quick 日", "echo": True, "logprobs": 2, "ignore_eos": True}
    choice = (await http.complete(**body, max_tokens=1))["choices"][0]
    told, count = choice["logprobs"], len(choice["logprobs"]["tokens"]) - 1
    assert "".join(told["tokens"][:count]).startswith("the quick ")
    assert choice["text"][told["text_offset"][count] :] == choice["text"].removeprefix("the quick 日")
    assert told["token_logprobs"] == [None, *[pytest.approx(math.log(1 / 1000))] * (count - 1), None]
    assert [None if top is None else len(top) for top in told["top_logprobs"]] == [None, *[2] * (count - 1), None]
    alone = await http.complete(**body, max_tokens=0, return_token_ids=True, n=2)
    for choice in alone["choices"]:
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("the quick 日", [], "length")
        assert choice["logprobs"] == {name: values[:count] for name, values in told.items()}
    assert alone["usage"]["completion_tokens"] == 0
    for max_tokens in (0, 3):
        events = await http.events(PATH, **body, max_tokens=max_tokens)
        first, *others = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert first["text"].startswith("the quick 日")
        assert {name: values[:count] for name, values in first["logprobs"].items()} == alone["choices"][0]["logprobs"]
        assert len(others) == max(0, max_tokens - 1)


async def test_calls_that_do_not_end_before_the_service_are_told_why(http: Http) -> None:
    http.service.fleet["d0"].hangs = {"decode"}
    body = {"prompt": [60], "max_tokens": 4, "ignore_eos": True}
    whole = asyncio.create_task(http.post(PATH, **body))
    stream = asyncio.create_task(http.events(PATH, **body))
    await http.service.until(lambda: len(http.service.fleet["d0"].requests) == 2)
    await asyncio.wait_for(http.service.gateway.stop(0.1), 3.0)
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NotReady")
    *_, failure, end = await stream
    assert (json.loads(failure)["error"]["code"], end) == ("NotReady", "[DONE]")


async def test_offsets_of_a_stream_count_from_the_beginning_of_the_text(http: Http) -> None:
    body: dict[str, Any] = {"prompt": "the quick 日", "echo": True, "logprobs": 0, "ignore_eos": True, "max_tokens": 6}
    offsets = (await http.complete(**body))["choices"][0]["logprobs"]["text_offset"]
    events = await http.events(PATH, **body)
    told = [json.loads(event)["choices"][0]["logprobs"]["text_offset"] for event in events[:-1]]
    assert [offset for each in told for offset in each] == offsets
    assert offsets[-1] > len("the quick 日")


async def test_null_is_the_default(http: Http) -> None:
    assert (await http.complete(prompt=[60], max_tokens=1, stream=None, echo=None))["choices"]


async def test_log_probabilities_of_prompts_are_bounded(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all prompts of a call."""
    monkeypatch.setattr(admitted_call, "MAX_PROMPT_LOGPROBS", 12)
    body = {"prompt": [[5, 6], [7, 8]], "echo": True, "max_tokens": 0}
    assert (await http.post(PATH, **body, logprobs=2)).status_code == 200
    for more in ({"logprobs": 3}, {"logprobs": 2, "n": 2}):
        refused = await http.post(PATH, **body, **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt"), refused.text
    assert MAX_PROMPT_LOGPROBS * 20 < 2**22, "an answer is within the bound that gRPC has for clients by default"


async def test_stop_strings(http: Http) -> None:
    text = (await http.complete(prompt="the quick", max_tokens=6, ignore_eos=True))["choices"][0]["text"]
    answer = await http.complete(prompt="the quick", max_tokens=6, ignore_eos=True, stop=text[3:5])
    assert answer["choices"][0]["text"] == text[:3]
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", text[3:5])


async def test_the_account_of_a_request_comes_when_it_is_asked_for(http: Http) -> None:
    http.service.fleet["p0"].fail("prefill", TransferError("late"))
    answer = await http.complete(
        prompt=[60] * 9, max_tokens=3, ignore_eos=True, request_id="mine", pdserve={"mode": "pd", "breakdown": True}
    )
    account = answer["pdserve"]
    assert (answer["id"], account["request_id"]) == ("mine", "mine")
    assert (account["mode"], account["prefill_worker"], account["decode_worker"]) == ("pd", "p0", "d0")
    assert account["transfer"]["kv_bytes"] == account["transfer"]["kv_bytes_expected"] > 0
    assert account["gateway_ttft_ms"]["prefill"] >= 0
    assert account["failures"] == [{"worker": "d0, p0", "error": "TransferError", "text": "late"}]
    assert len(account["placements"]) == account["attempts"] == 2
    assert {"received", "finished"} <= {event["kind"] for event in account["events"]}
    alone = await http.complete(prompt=[60], max_tokens=2, pdserve={"mode": "colocated", "breakdown": True})
    assert alone["pdserve"]["mode"] == "colocated"


async def test_the_request_id_comes_from_body_or_header_and_goes_back(http: Http) -> None:
    body = {"prompt": [60], "max_tokens": 1}
    given = await http.client.post(PATH, json=body, headers={"x-request-id": "from-header"})
    assert (given.json()["id"], given.headers["x-request-id"]) == ("from-header", "from-header")
    both = await http.client.post(PATH, json={**body, "request_id": "from-body"}, headers={"x-request-id": "no"})
    assert both.headers["x-request-id"] == "from-body"
    wrong = await http.client.post(PATH, json={**body, "request_id": "from-body"}, headers={"x-request-id": "a;b"})
    assert wrong.status_code == 400  # though the body's replaces it
    made = await http.client.post(PATH, json=body)
    assert made.headers["x-request-id"].startswith("cmpl-")
    bad = await http.post(PATH, **body, request_id="a\r\nset-cookie: x")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")
    assert "set-cookie" not in bad.headers


async def test_a_client_that_leaves_frees_everything(http: Http) -> None:
    http.service.fleet["d0"].hangs.add("decode_step")
    for stream in (False, True):
        call = asyncio.create_task(http.post(PATH, prompt=[60], max_tokens=9, stream=stream, ignore_eos=True))
        await http.service.until(lambda: http.service.gateway.router.running == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await http.service.until(lambda: http.service.is_idle and http.service.gateway.router.running == 0)


async def test_a_failure_in_a_stream_is_an_event(start_http: StartHttp) -> None:
    http = await start_http("p0", "d0", router={"max_attempts": 1})
    http.service.fleet["d0"].fail("decode_more", WorkerLost("gone"))
    *_, failure, done = await http.events(PATH, prompt=[60], max_tokens=9, ignore_eos=True)
    assert done == "[DONE]"
    assert json.loads(failure)["error"]["code"] == "WorkerLost"


async def test_before_there_are_workers(start_http: StartHttp) -> None:
    http = await start_http()
    answer = await http.post(PATH, prompt=[60])
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    for path in ("/health", "/healthz"):
        health = await http.client.get(path)
        assert (health.status_code, health.json()["error"]["code"]) == (503, "NotReady")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline(http: Http, stream: bool) -> None:
    http.service.fleet["p0"].hangs.add("prefill")
    answer = await http.post(PATH, prompt=[60], stream=stream, pdserve={"timeout_s": 0.1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DeadlineExceeded")
    await http.service.until(lambda: http.service.is_idle)
