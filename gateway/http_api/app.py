"""The routes of the HTTP API."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from gateway.callers import Caller
from gateway.failures import http_failure
from gateway.http_api.access import Access, caller_of
from gateway.http_api.calls import detokenization, generation, tokenization
from gateway.http_api.exchange import ServedModel
from gateway.http_api.openapi import answers, describe, failures, generates, manual, takes
from gateway.http_api.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.metrics import CONTENT_TYPE
from pdserve.core.errors import InvalidRequest, PdserveError

_READING = (400, 404, 408, 413, 415, 429, 503, 504)
"""Statuses of routes that read a body and generate nothing."""
_NO_TEXT = "it is not served: the service generates text, and makes no embeddings, rankings or scores"
_NO_PATH = "there is no such path; GET /docs shows those that are served"
_CONTENT = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Pages load nothing."""
_NO_REPORT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>pdserve: no report yet</title>
<h1>No report yet</h1><p>The user who started the service makes one on its host, and it appears here:</p>
<pre>pdserve experiment added-ttft --quick
pdserve bench --requests 32 --mode both --output results</pre></html>"""
_LIVE_CONTENT = f"{_CONTENT}; script-src 'unsafe-inline'; connect-src 'self'"
"""The live page loads nothing but its own data and the pages that it links."""


def make_app(
    served: ServedModel,
    version: str,
    problem: Callable[[], PdserveError | None],
    metrics: Callable[[], bytes],
    live: Callable[[Caller], dict[str, Any]],
    host_names: Collection[str] | None,
    report: Path | None,
) -> FastAPI:
    """The application. ``problem`` gives the reason why requests cannot be served now, ``metrics`` all metrics in
    Prometheus' text format, ``live`` what the live page shows to a caller. ``host_names``: see `Access`.
    ``report``: the page at ``/report``, for callers that see all."""
    app = FastAPI(
        title="pdserve",
        version=version,
        description="OpenAI's API, with vLLM's extensions and the object `pdserve`. See docs/api.md. Besides the "
        "statuses of each route: 400, 408 and 431 for requests that are no proper HTTP, with the same object `error`.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a path with a slash too many is another path, as with any other mistake in it
    )
    describe(app)
    app.add_middleware(Access, inference=served.inference, host_names=host_names)

    def reported(caller: Caller) -> bool:
        return report is not None and caller.sees_all and report.is_file()

    created_s = int(time.time())
    page = Path(__file__).with_name("live.html").read_text(encoding="utf-8")

    @app.post("/v1/completions", tags=["OpenAI"], **generates(CompletionBody, "Completion"))
    async def complete(request: Request) -> Response:
        """Continue prompts. With `stream: true`, one server-sent event for each token."""
        return generation(served, CompletionBody, request.headers)

    @app.post("/v1/chat/completions", tags=["OpenAI"], **generates(ChatBody, "Chat"))
    async def chat(request: Request) -> Response:
        """Continue a chat, by the model's chat template."""
        return generation(served, ChatBody, request.headers)

    @app.get("/v1/models", tags=["OpenAI"], response_model=None, responses=answers("Models"))
    async def models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [_model(served, created_s)]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], response_model=None, responses=answers("Model", 404))
    async def model(name: str) -> dict[str, Any]:
        """The served model, by name."""
        served.check_model(name)
        return _model(served, created_s)

    @app.post("/tokenize", tags=["vLLM"], responses=answers("Tokens", *_READING), openapi_extra=takes(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of messages."""
        return tokenization(served)

    @app.post("/detokenize", tags=["vLLM"], responses=answers("Text", *_READING), openapi_extra=takes(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return detokenization(served)

    unready = failures(503)

    @app.get("/health", tags=["operations"], response_class=Response, responses=unready)
    @app.get("/healthz", include_in_schema=False)  # the name that Kubernetes' probes often have
    async def health() -> Response:
        """Status 200 if requests are served."""
        if (reason := problem()) is not None:
            raise reason
        return Response(status_code=200)

    @app.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Metrics for Prometheus; see docs/operations.md."""
        return Response(metrics(), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def live_page() -> Response:
        """A page that shows the service while it runs."""
        return HTMLResponse(page, headers={"content-security-policy": _LIVE_CONTENT})

    described = functools.cache(lambda: manual(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def api_page() -> Response:
        """The API's page."""
        return HTMLResponse(described(), headers={"content-security-policy": _CONTENT})

    @app.get("/report", include_in_schema=False)
    async def last_report(request: Request) -> Response:
        """The report of the last run, for operators."""
        caller, policy = caller_of(request.scope), {"content-security-policy": _CONTENT}
        if not caller.sees_all:
            raise InvalidRequest(
                "authorization: the report is for operators; `pdserve token new NAME --operator` makes their tokens",
                kind="NotAnOperator",
            )
        if report is None or not reported(caller):
            return HTMLResponse(_NO_REPORT, 404, headers=policy)
        return FileResponse(report, media_type="text/html", headers=policy)

    @app.get("/live.json", tags=["operations"], response_model=None, responses=answers("Live"))
    async def live_json(request: Request) -> dict[str, Any]:
        """What the page at / shows: workers, links, the caller's running requests, and breakdowns of its last ones."""
        caller = caller_of(request.scope)
        return {**live(caller), "report": reported(caller)}

    @app.get("/version", tags=["operations"], response_model=None, responses=answers("Version"))
    async def show_version() -> dict[str, str]:
        """The service's version."""
        return {"version": version}

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse(*http_failure(error))

    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # The scope's path, because `request.url` is put together from the header Host, which may be no host at all.
        path, kind, why = request.scope["path"], "InvalidRequest", error.detail
        if error.status_code == 404:
            kind, why = "UnknownPath", _NO_PATH
        if path.rpartition("/")[2] in ("embeddings", "rerank", "score"):
            why = _NO_TEXT
        body, _, _ = http_failure(InvalidRequest(f"path: {request.method} {path}: {why}", kind=kind))
        return JSONResponse(body, error.status_code, dict(error.headers or {}))

    app.add_exception_handler(PdserveError, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    return app


def _model(served: ServedModel, created_s: int) -> dict[str, Any]:
    limits = served.inference.known_limits()
    return {
        "id": served.model,
        "object": "model",
        "created": created_s,
        "owned_by": "pdserve",
        "max_model_len": None if limits is None else limits.context_length,
    }
