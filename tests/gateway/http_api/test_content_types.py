"""Bodies that are not said to be JSON, which web pages of other sites could send."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.gateway.http_api.conftest import Http, shared

PATH = "/v1/completions"
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()

JSON_TYPES = ["application/json", "application/json; charset=utf-8", "Application/JSON ;charset=UTF-8"]
SIMPLE_TYPES = [
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain;application/json",
    "application/json-patch+json", "text/json", "application", "",
]  # fmt: skip
"""The first three are those that a page may send to other sites without asking them."""


@shared
@pytest.mark.parametrize("kind", JSON_TYPES)
async def test_json_is_read(shared_http: Http, kind: str) -> None:
    answer = await shared_http.client.post(PATH, content=BODY, headers={"content-type": kind})
    assert answer.status_code == 200, answer.text


@shared
@pytest.mark.parametrize("kind", [None, *SIMPLE_TYPES])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_other_content_types_are_refused(shared_http: Http, kind: str | None, path: str) -> None:
    headers = {} if kind is None else {"content-type": kind}
    async with httpx2.AsyncClient(base_url=shared_http.url) as client:
        answer = await client.post(path, content=BODY, headers=headers)
    assert answer.status_code == 415, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("content-type", "UnsupportedMediaType")
    assert error["message"].endswith("send the header `content-type: application/json`")
    assert not any(worker.requests for worker in shared_http.service.fleet.values())


@shared
async def test_pages_of_other_sites_get_no_permission(shared_http: Http) -> None:
    """What a browser asks before it sends JSON to another site, and what it looks for before a page may read."""
    page: dict[str, Any] = {"origin": "https://other.example"}
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    asked = await shared_http.client.options(PATH, headers={**page, **asking})
    assert asked.status_code == 405
    for answer in (asked, await shared_http.client.get("/live.json", headers=page)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
