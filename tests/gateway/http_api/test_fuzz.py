"""Damaged and random requests over HTTP: each is answered, or refused with a documented status that names the field."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from gateway.http_api import requests
from gateway.http_api.requests import invalid_body
from pdserve.core.errors import InvalidRequest
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
from tests.gateway.http_api.conftest import Http, shared
from tests.gateway.mutations import JsonMutator

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
FULL = {
    **SAMPLING, "logit_bias": {"5": -100, "7": 2.5}, "n": 2, "user": "me", "metadata": {"a": "b"},
    "cache_salt": "tenant", "pdserve": {"mode": "pd", "timeout_s": 25.0, "breakdown": True},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": [{"type": "text", "text": "the quick"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "1"},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}
SAMPLES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"prompt": "the quick brown fox", "max_tokens": 4, "model": "fake"},
        {"prompt": [5, 6, 300, 999], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": ["größer 😀", "b"], "logprobs": 3, "suffix": "", "best_of": 2, **FULL},
        {"prompt": [[1, 2], [3]], "echo": True, "request_id": "same", "return_token_ids": True},
        {"prompt": "x", "echo": True, "logprobs": 2, "max_tokens": 0, "structured_outputs": {"regex": "[a-c]+"}},
        {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "max_completion_tokens": 4},
    ],
    CHAT: [
        {"messages": MESSAGES[:2], "max_tokens": 4},
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "logprobs": True, "top_logprobs": 2, **FULL},
        {"messages": MESSAGES[:2], "stream": True, "chat_template_kwargs": {"a": [1]}},
        {"messages": MESSAGES[1:2], "response_format": {"type": "text"}},
        {"messages": MESSAGES[1:2], "response_format": SCHEMA, "max_tokens": 4},
        {"messages": MESSAGES[1:2], "tools": TOOLS, "tool_choice": "required", "max_tokens": 4},
    ],
    TOKENIZE: [
        {"prompt": "the quick", "add_special_tokens": False, "return_token_strs": True},
        {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": False},
    ],
    DETOKENIZE: [{"tokens": [5, 6, 300, 999], "model": "fake"}],
}  # fmt: skip
ALLOWED = {200, 400, 404, 413}


def check_answer(answer: httpx2.Response, data: bytes) -> None:
    """The answer is one that the manual knows, and not only for some requests."""
    status = answer.status_code
    explained = {
        409: b"request_id" in data,  # several at once have the same one
        504: b"timeout_s" in data,
    }
    assert status in ALLOWED or explained.get(status), f"{status} {answer.text} for {data!r}"
    if status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        return
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    if status != 200:
        error = content["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert status == 504 or error["message"].startswith(f"{error['param']}: "), error
        assert len(error["message"]) < 4_000


@short_and_soak
async def test_damaged_bodies(http: Http, draws: Draws, caplog: pytest.LogCaptureFixture) -> None:
    ends_soon(http.service)
    found: Counter[int] = Counter()
    mutators = {path: JsonMutator(samples, SEED) for path, samples in SAMPLES.items()}
    weights = {COMPLETIONS: 5, CHAT: 4, TOKENIZE: 2, DETOKENIZE: 1}
    paths = [path for path, weight in weights.items() for _ in range(weight)]
    left = iter(range(draws.mutated_http))

    async def send() -> None:
        for number in left:
            path = paths[number % len(paths)]
            data = mutators[path].draw()
            answer = await http.client.post(path, content=data, timeout=ANSWER_S)
            check_answer(answer, data)
            found[answer.status_code] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(send())
    log.info("damaged bodies: %s", dict(found))
    assert min(found[200], found[400]) > draws.mutated_http / 40, found
    await check_alive(http.service)
    assert "unexpected error" not in caplog.text
    assert "Traceback" not in caplog.text


@short_and_soak
async def test_what_schemathesis_draws_from_the_document(
    http: Http, draws: Draws, caplog: pytest.LogCaptureFixture
) -> None:
    ends_soon(http.service)
    served = http.service.gateway._http
    assert served is not None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gateway.http_api.schema_fuzzer", http.url, str(draws.schema_http), cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 60.0 + draws.schema_http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-8_000:] + output.decode()[-2_000:]
    counts: dict[str, int] = json.loads(output)
    log.info("schemathesis: %s", counts)
    assert sum(counts.values()) >= 0.8 * draws.schema_http, counts
    assert counts["positive 200"] > 0, counts
    assert counts["negative 400"] > 0, counts
    assert served.server_state.total_requests >= sum(counts.values())
    await check_alive(http.service)
    assert "unexpected error" not in caplog.text


# --- built requests --------------------------------------------------------------------------------------------------

token_ids = st.integers(0, 999)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


sampling = optional(
    temperature=st.none() | st.floats(0, 100) | st.integers(0, 100),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(-1, 2**32 - 1),
    min_p=st.none() | st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    n=st.none() | st.integers(1, 3),
    stop=st.none() | st.text(min_size=1, max_size=20) | st.lists(st.text(min_size=1, max_size=20), max_size=16),
    stop_token_ids=st.none() | st.lists(token_ids, max_size=20),
    ignore_eos=st.booleans(),
    repetition_penalty=st.none() | st.floats(0, 10, exclude_min=True),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(token_ids.map(str), st.floats(-100, 100), max_size=20),
    max_completion_tokens=st.none() | st.integers(1, 60),
    return_token_ids=st.booleans(),
    cache_salt=st.none() | st.text(max_size=256),
    session_id=st.none() | st.text(max_size=256),
    request_id=st.none() | st.just("") | st.from_regex(r"[A-Za-z0-9._:-]{1,120}", fullmatch=True),
    model=st.sampled_from([None, "fake"]),
    user=st.none() | st.text(),
    metadata=st.none() | st.dictionaries(st.text(), st.text(), max_size=16),
    pdserve=optional(
        mode=st.sampled_from(["auto", "pd", "colocated"]), timeout_s=st.floats(60, 86_400), breakdown=st.booleans()
    ),
    min_tokens=st.just(0),
)
text = st.text(min_size=1, max_size=20)
streams = st.sampled_from([
    {}, {"stream": False}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
])  # fmt: skip
prompts = st.fixed_dictionaries({
    "prompt": text | st.lists(text, min_size=1, max_size=3) | st.lists(token_ids, min_size=1, max_size=60)
    | st.lists(st.lists(token_ids, min_size=1, max_size=20), min_size=1, max_size=3)
})  # fmt: skip
log_probabilities = st.sampled_from([{}, {"logprobs": None}, {"logprobs": 0}, {"logprobs": 20}, {"echo": True},
    {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 0, "max_tokens": 0}])  # fmt: skip
structures = st.sampled_from([
    {}, {}, {"structured_outputs": None}, {"response_format": None}, {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}}, {"response_format": SCHEMA},
    *({"structured_outputs": {kind: value}} for kind, value in (
        ("json", {}), ("json", "{}"), ("json_object", True), ("regex", "[a-z]"), ("choice", ["é", "b"]),
        ("grammar", 'start: "a"'),
    )),
])  # fmt: skip
forced_calls = st.sampled_from([
    {"tools": TOOLS, "tool_choice": choice} for choice in ("required", {"type": "function", "function": {"name": "f"}})
])  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": st.none()
            | st.text(max_size=10)
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2),
        },
        optional={"name": st.text(max_size=5), "tool_calls": st.just(CALLS)},
    ),
    min_size=1,
    max_size=2,
)
chats_of_messages = st.fixed_dictionaries({"messages": messages})
chat_options = st.sampled_from([
    {}, {"tools": None}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20},
    {"tool_choice": "none"}, {"add_generation_prompt": False},
])  # fmt: skip


completions = st.tuples(prompts, sampling, streams, log_probabilities, structures)
chats = st.tuples(chats_of_messages, sampling, streams, chat_options, structures | forced_calls)


def draw_built(url: str, count: int) -> None:
    """Check that ``count`` valid requests are answered with what the document says. Blocks."""
    checks = settings(max_examples=count // 2, deadline=None, suppress_health_check=list(HealthCheck))
    with httpx2.Client(base_url=url, timeout=ANSWER_S) as client:
        components = client.get("/openapi.json").json()["components"]

        def check(path: str, answer: str, parts: tuple[dict[str, Any], ...]) -> None:
            body = {name: value for part in parts for name, value in part.items()}
            if any(body.get(name) for name in ("structured_outputs", "response_format", "tools")):
                body.pop("ignore_eos", None)  # these exclude what could leave no token
                biases = body.get("logit_bias") or {}
                body["logit_bias"] = {key: bias for key, bias in biases.items() if abs(bias) < 100}
            if "max_tokens" in body:
                body.pop("max_completion_tokens", None)
            whole, chunk = (
                Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})
                for name in (answer, f"{answer}Chunk")
            )
            got = client.post(path, json=body)
            assert got.status_code == 200, got.text
            if not body.get("stream"):
                whole.validate(got.json())
                return
            *events, done, end = got.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            for event in events:
                chunk.validate(json.loads(event.removeprefix("data: ")))

        @checks
        @given(completions)
        def completion(parts: tuple[dict[str, Any], ...]) -> None:
            check(COMPLETIONS, "Completion", parts)

        @checks
        @given(chats)
        def chat(parts: tuple[dict[str, Any], ...]) -> None:
            check(CHAT, "Chat", parts)

        completion()
        chat()


@short_and_soak
async def test_built_requests(http: Http, draws: Draws) -> None:
    ends_soon(http.service)
    await asyncio.to_thread(draw_built, http.url, draws.built_http)
    await check_alive(http.service)


# --- what was found --------------------------------------------------------------------------------------------------


@shared
@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"prompt": "x", "seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}", "body"),
        (b'{"prompt": "x", "a b": 1}', "body"),
        (b'{"prompt": "x", "": 1}', "body"),
        (b'{"prompt": "x", "a: b": 1}', "body"),
        (b'{"prompt": "x", "' + b"k" * 100_000 + b'": 1}', "body"),
        (b'{"prompt": "x", "Top_P": 1}', "Top_P"),
        (b'{"prompt": "x", "pdserve": {"modus": 1}}', "pdserve.modus"),
        (b'{"prompt": "x", "pdserve": {"a b": 1}}', "pdserve"),
        (b'{"prompt": "x", "cache_salt": "' + b"x" * 257 + b'"}', "cache_salt"),
        (b'{"prompt": "' + b"x" * 500_000 + b'", "top_p": {}}', "top_p"),
        (b'{"prompt": ' + b"[" * 60 + b"]" * 60 + b"}", "prompt.0.0"),
    ],
)
async def test_refusals_name_the_field_and_are_short(shared_http: Http, data: bytes, param: str) -> None:
    answer = await shared_http.client.post(COMPLETIONS, content=data)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert len(error["message"]) < 400


@shared
@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x"' + b"".join(b', "k%d": 1' % index for index in range(900)) + b"}",
        b'{"prompt": ["x"' + b", 1" * 20_000 + b"]}",
        b'{"prompt": [1' + b', ""' * 20_000 + b"]}",
        b'{"prompt": [[1]' + b", 1" * 20_000 + b"]}",
        b'{"prompt": "x", "metadata": {' + b", ".join(b'"k%d": 1' % index for index in range(900)) + b"}}",
        b'{"prompt": "x", "logit_bias": {' + b", ".join(b'"k%d": 1' % index for index in range(900)) + b"}}",
        b'{"prompt": "x", "stop": [1' + b", 1" * 20_000 + b"]}",
    ],
    ids=["fields", "texts", "ids", "lists", "metadata", "logit_bias", "stop"],
)
async def test_a_body_with_very_many_mistakes_has_few_errors(
    shared_http: Http, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def refuse(error: ValidationError) -> InvalidRequest:
        counted.append(error.error_count())
        return invalid_body(error)

    monkeypatch.setattr(requests, "invalid_body", refuse)
    answer = await shared_http.client.post(COMPLETIONS, content=data)
    assert answer.status_code == 400, answer.text
    assert counted[0] < 100


@shared
async def test_numbers_that_json_does_not_have(shared_http: Http) -> None:
    for value in (math.nan, math.inf, -math.inf):
        body = json.dumps({"prompt": "x", "pdserve": {"timeout_s": value}})
        answer = await shared_http.client.post(COMPLETIONS, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pdserve.timeout_s")
