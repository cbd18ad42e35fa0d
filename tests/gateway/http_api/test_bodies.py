"""Bodies that are refused, and routes that there are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.http_api.conftest import Http, shared

PATH = "/v1/completions"


@shared
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt.1.0"),
        ({"prompt": [2**32]}, "prompt.0"),
        ({"prompt": "x", "tokens": 5}, "tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"prompt": "x", "stop": [5]}, "stop.0"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "min_tokens": 3}, "min_tokens"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "pdserve": {"mode": "fast"}}, "pdserve.mode"),
        ({"prompt": "x", "pdserve": {"timeout_s": 0}}, "pdserve.timeout_s"),
        ({"prompt": "x", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "x", "request_id": "a b"}, "request_id"),
    ],
)
async def test_a_wrong_field_is_named(shared_http: Http, body: dict[str, Any], param: str) -> None:
    answer = await shared_http.post(PATH, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", "InvalidRequest")
    assert error["message"].startswith(f"{param}: ")
    shared_http.service.check_idle()


@shared
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": "\xff"}',
        rb'{"prompt": "\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[" * 100_000,
    ],
)
async def test_bodies_that_are_no_json(shared_http: Http, data: bytes) -> None:
    answer = await shared_http.client.post(PATH, content=data)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("body", "temperature")


@shared
async def test_fields_that_ask_for_nothing_are_accepted(shared_http: Http) -> None:
    await shared_http.complete(
        prompt=[60], max_tokens=2, model="fake", user="me", best_of=1, suffix="", logit_bias=None, stop=None, seed=None,
        min_tokens=2, ignore_eos=True, top_k=-1, skip_special_tokens=True, metadata={"a": "b"}, stream_options=None,
    )  # fmt: skip


@shared
async def test_a_body_that_is_too_large(shared_http: Http) -> None:
    answer = await shared_http.client.post(PATH, content=b'{"prompt": "' + b"x" * 2**21 + b'"}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


@shared
async def test_other_models_and_routes(shared_http: Http) -> None:
    for answer in (
        await shared_http.post(PATH, prompt="x", model="gpt-4"),
        await shared_http.client.get("/v1/models/gpt-4"),
        await shared_http.client.get("/v2/completions"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    wrong = await shared_http.client.get(PATH)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


@shared
async def test_the_other_routes(shared_http: Http) -> None:
    get = shared_http.client.get
    assert (await get("/health")).status_code == 200
    assert (await get("/version")).json() == {"version": "1.2.3"}
    (model,) = (await get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 256)
    assert (await get("/v1/models/fake")).json() == model
    assert PATH in (await get("/openapi.json")).json()["paths"]


@shared
async def test_tokens_of_text_and_back(shared_http: Http) -> None:
    text = "größer, the quick"
    tokenizer = shared_http.service.gateway._inference.tokenizer
    assert tokenizer is not None
    answer = (await shared_http.post("/tokenize", prompt=text, return_token_strs=True)).json()
    assert answer["tokens"] == list(tokenizer.encode(text))
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert len(answer["token_strs"]) == answer["count"]
    assert (await shared_http.post("/detokenize", tokens=answer["tokens"])).json() == {"prompt": text}
    chat = (await shared_http.post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()
    assert chat["tokens"] == list(tokenizer.encode("<s>[user] hi\n[assistant] ", special_tokens=False))
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": [999_999]}),
    ):
        assert (await shared_http.post(path, **body)).status_code == 400


@shared
@pytest.mark.parametrize("form", ["json", "regex", "choice", "grammar"])
async def test_older_names_of_structured_outputs_tell_the_field(shared_http: Http, form: str) -> None:
    for body in ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
        path = PATH if "prompt" in body else "/v1/chat/completions"
        error = (await shared_http.post(path, **body, **{f"guided_{form}": "x"})).json()["error"]
        assert error["param"] == f"guided_{form}"
        assert error["message"].endswith(f": unknown field; send structured_outputs: {{{form}: ...}} instead")
    error = (await shared_http.post(PATH, prompt="x", guided_whitespace_pattern="x")).json()["error"]
    assert error["message"] == "guided_whitespace_pattern: unknown field; leave it out"
