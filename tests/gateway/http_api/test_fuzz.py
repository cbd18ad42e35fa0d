"""Random requests over HTTP, drawn from the OpenAPI document, and requests that were once answered wrongly."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.http_api import requests
from gateway.http_api.requests import invalid_body
from pdserve.core.errors import InvalidRequest
from tests.gateway.fuzzing import Draws, check_alive, ends_soon, short_and_soak
from tests.gateway.http_api.conftest import Http, shared

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]

COMPLETIONS = "/v1/completions"


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
