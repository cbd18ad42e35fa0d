"""The routes of the HTTP API."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from gateway.http_api.authentication import HEALTH_PATH, PAGE_PATH, Authentication
from gateway.http_api.failures import failure_of
from gateway.http_api.generation import ChatExchange, CompletionExchange, Served
from gateway.http_api.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.http_api.utilities import DetokenizeExchange, TokenizeExchange
from gateway.metrics import CONTENT_TYPE
from pdserve.core.errors import InvalidRequest, PdserveError, UnknownModel

_CONTENT = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
"""The live page loads nothing but its own data."""


def make_app(
    served: Served,
    version: str,
    problem: Callable[[], PdserveError | None],
    metrics: Callable[[], bytes],
    live: Callable[[], dict[str, Any]],
) -> FastAPI:
    """The application. ``problem`` gives the reason why requests cannot be served now, ``metrics`` all metrics in
    Prometheus' text format, ``live`` what the live page shows."""
    app = FastAPI(
        title="pdserve",
        version=version,
        description="OpenAI's API, with vLLM's extensions and the object `pdserve`. See docs/api.md.",
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Authentication, identify=served.inference.identify)
    created_s = int(time.time())
    page = Path(__file__).with_name("live.html").read_text(encoding="utf-8")

    @app.post("/v1/completions", tags=["OpenAI"], **_described(CompletionBody, streams=True))
    async def complete(request: Request) -> Response:
        """Continue prompts. With `stream: true`, one server-sent event for each token."""
        return CompletionExchange(served, _request_id(request))

    @app.post("/v1/chat/completions", tags=["OpenAI"], **_described(ChatBody, streams=True))
    async def chat(request: Request) -> Response:
        """Continue a chat, by the model's chat template."""
        return ChatExchange(served, _request_id(request))

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [_model(served, created_s)]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], responses={404: {"description": "another model"}})
    async def model(name: str) -> dict[str, Any]:
        """The served model, by name."""
        served.check_model(name)
        return _model(served, created_s)

    @app.post("/tokenize", tags=["vLLM"], **_described(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of messages."""
        return TokenizeExchange(served)

    @app.post("/detokenize", tags=["vLLM"], **_described(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return DetokenizeExchange(served)

    @app.get(HEALTH_PATH, tags=["operations"], responses={503: {"description": "not ready; the body says why"}})
    async def health() -> Response:
        """Status 200 if requests are served."""
        if (reason := problem()) is not None:
            raise reason
        return Response(status_code=200)

    @app.get("/metrics", tags=["operations"])
    async def show_metrics() -> Response:
        """Metrics for Prometheus; see docs/operations.md."""
        return Response(metrics(), media_type=CONTENT_TYPE)

    @app.get(PAGE_PATH, include_in_schema=False)
    async def live_page() -> Response:
        """A page that shows the service while it runs."""
        return HTMLResponse(page, headers={"content-security-policy": _CONTENT})

    @app.get("/live.json", tags=["operations"])
    async def live_json() -> dict[str, Any]:
        """What the page at / shows: workers, links, running requests, and breakdowns of the last ones."""
        return live()

    @app.get("/version", tags=["operations"])
    async def show_version() -> dict[str, str]:
        """The service's version."""
        return {"version": version}

    async def refuse(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        return JSONResponse(failure.body, failure.status, dict(failure.headers))

    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        wrong = UnknownModel if error.status_code == 404 else InvalidRequest
        failure = failure_of(wrong(f"path: {request.method} {request.url.path}: {error.detail}"))
        return JSONResponse(failure.body, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(PdserveError, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    return app


def _described(body: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """What the OpenAPI document says of a route whose body the route itself reads."""
    content = {"application/json": {"schema": body.model_json_schema()}}
    errors = {400: "a field is wrong", 401: "no valid token", 404: "another model", 409: "the request id is in use",
              413: "too large", 429: "see Retry-After", 503: "not ready", 504: "the deadline passed"}  # fmt: skip
    answers: dict[int | str, dict[str, Any]] = {code: {"description": text} for code, text in errors.items()}
    kinds: dict[str, Any] = {"application/json": {}, **({"text/event-stream": {}} if streams else {})}
    answers[200] = {"description": "the answer", "content": kinds}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}, "responses": answers}


def _model(served: Served, created_s: int) -> dict[str, Any]:
    limits = served.inference.known_limits
    return {
        "id": served.model,
        "object": "model",
        "created": created_s,
        "owned_by": "pdserve",
        "max_model_len": None if limits is None else limits.context_length,
    }


def _request_id(request: Request) -> str:
    """The client's request id, not checked yet; empty without one."""
    return request.headers.get("x-request-id", "")
