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
from tests.gateway.mutations import Mutator

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
    mutators = {
        path: Mutator([json.dumps(sample).encode() for sample in samples], SEED, 1) for path, samples in SAMPLES.items()
    }
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
