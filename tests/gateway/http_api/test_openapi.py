"""What `GET /openapi.json` says of the routes."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.failures import INVALID, STATUSES
from tests.gateway.http_api.conftest import Http

API = Path(__file__).resolve().parents[3] / "docs" / "api.md"
COMPONENTS = "#/components/schemas/"
NOT_SENT = {499, 500}
"""To a client that has left, and for bugs."""


async def test_the_page_has_every_route_and_field_and_no_script(http: Http, document: dict[str, Any]) -> None:
    answer = await http.client.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = html.unescape(answer.text)
    for path, item in document["paths"].items():
        assert all(f"<h2>{method.upper()} {path}</h2>" in page for method in item)
    for schema in document["components"]["schemas"].values():
        for field, each in schema.get("properties", {}).items():
            assert f"<td>{field}<td>" in page
            assert each.get("description", "") in page
    assert "<script" not in page
    links = re.findall(r"(?:src|href)=\"(.*?)\"", page)
    assert {link.removeprefix("#") for link in links} <= set(re.findall(r"id=\"(.*?)\"", page))


@pytest.fixture
async def document(http: Http) -> dict[str, Any]:
    return dict((await http.client.get("/openapi.json")).json())


def schema_of(document: dict[str, Any], name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"{COMPONENTS}{name}", "components": document["components"]})


def test_routes_and_statuses(document: dict[str, Any]) -> None:
    routes = {f"{method} {path}": each for path, item in document["paths"].items() for method, each in item.items()}
    assert sorted(routes) == [
        "get /health", "get /live.json", "get /metrics", "get /v1/models", "get /v1/models/{name}", "get /version",
        "post /detokenize", "post /tokenize", "post /v1/chat/completions", "post /v1/completions",
    ]  # fmt: skip
    refused = {*INVALID.values(), *(status for _, status in STATUSES.values())}
    answered = {str(status) for status in {200, *refused} - NOT_SENT}
    for path in ("/v1/completions", "/v1/chat/completions"):
        route = routes[f"post {path}"]
        assert set(route["responses"]) == answered
        assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "retry-after" in route["responses"]["429"]["headers"]
    for route in routes.values():
        for status, response in route["responses"].items():
            if status != "200":
                assert response["content"]["application/json"]["schema"] == {"$ref": f"{COMPONENTS}Error"}
    assert {name for name, route in routes.items() if "401" not in route["responses"]} == {"get /health"}
    assert "content" not in routes["get /health"]["responses"]["200"]
    assert set(routes["get /metrics"]["responses"]["200"]["content"]) == {"text/plain"}


async def test_events_are_what_it_says(http: Http, document: dict[str, Any]) -> None:
    options = {
        "max_tokens": 3, "logprobs": 1, "ignore_eos": True, "return_token_ids": True, "pdserve": {"breakdown": True},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    *events, _ = await http.events("/v1/completions", prompt="the quick", **options)
    for event in events:
        schema_of(document, "CompletionChunk").validate(json.loads(event))
    options["logprobs"] = True
    *events, _ = await http.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **options)
    for event in events:
        schema_of(document, "ChatChunk").validate(json.loads(event))


def test_the_manual_shows_every_route(document: dict[str, Any]) -> None:
    text = API.read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    python = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for path in (*document["paths"], "/openapi.json"):
        shown = path.replace("{name}", "tiny")
        assert f"localhost:8000{shown}" in shell, f"docs/api.md calls {path} with curl"
        assert shown in python or shown.removeprefix("/v1") in WITH_OPENAI, f"docs/api.md calls {path} with Python"


WITH_OPENAI = {"/completions", "/chat/completions", "/models", "/models/tiny"}
"""By methods of the package `openai`."""
