"""Loads on servers with OpenAI's API: pdserve's own, which returns token ids, and one that knows no extension."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from experiments.load import Load, run_load
from experiments.openai_server import OpenAIServer
from experiments.run_folder import UNKNOWN_TOKEN
from experiments.workloads.arrivals import ClosedLoop
from experiments.workloads.conversation import Conversation, Turn
from pdserve import CapacityExceeded, DeadlineExceeded, InvalidRequest, NotReady, WorkerLost
from pdserve.core.request import Mode
from tests.external_engines.recorded_vllm import greedy, running, serving
from tests.external_engines.test_vllm_protocol import service
from tests.local_cluster import free_port

PROMPT = tuple(range(5, 45))


def turn(prompt: tuple[int, ...] | str, output_len: int = 4) -> Turn:
    return Turn((), output_len, text=prompt) if isinstance(prompt, str) else Turn(prompt, output_len)


async def put_on(url: str, *turns: Turn, timeout_s: float = 10.0, **access: Any) -> Load:
    async with OpenAIServer(url, access) as server:  # type: ignore[arg-type]
        return await run_load(server, [Conversation(turns)], ClosedLoop(1), mode=Mode.AUTO, timeout_s=timeout_s)


async def test_tokens_and_usage_of_a_server_that_returns_token_ids() -> None:
    async with service(("gateway.http_port", free_port())) as served:
        await served.ready()
        load = await put_on(f"http://127.0.0.1:{served.gateway.http_port}/v1", turn(PROMPT, 8))
    (outcome,) = load.outcomes
    assert outcome.error is None
    assert outcome.generation is not None
    assert list(outcome.generation.token_ids) == greedy(list(PROMPT), 8)
    assert outcome.prompt_tokens == outcome.generation.prompt_tokens == len(PROMPT)
    assert outcome.generation.finish_reason == "length"
    assert len(outcome.generation.itl_ms) == 7
    assert not outcome.generation.breakdowns


class PlainServer:
    """The streamed completions of OpenAI's API without any extension. Two parts are a token each, and the third is
    two tokens."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.refuses: int | None = None
        self.breaks = self.hangs = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(lambda: {"object": "list", "data": [{"id": "plain"}]})
        app.post("/v1/completions")(self._complete)
        return app

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.refuses is not None:
            answer = {"error": {"message": "not now", "type": "e", "code": self.refuses}}
            return JSONResponse(answer, self.refuses, headers={"Retry-After": "3"})
        return StreamingResponse(self._parts(), media_type="text/event-stream")

    async def _parts(self) -> AsyncIterator[str]:
        if self.hangs:
            await asyncio.sleep(60.0)
        for text, reason in (("a", None), ("b", None), ("cd", None), ("", "length")):
            if self.breaks and text == "cd":
                return
            yield part({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})
        yield part({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
        yield "data: [DONE]\n\n"


def part(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def test_a_server_without_token_ids_is_counted_by_its_usage() -> None:
    server = PlainServer()
    async with serving(server):
        load = await put_on(server.url, turn("hello"), turn(" and on"), token="secret")
    first, second = (outcome.generation for outcome in load.outcomes)
    assert first is not None
    assert second is not None
    assert first.text == "abcd"
    assert first.token_ids == (UNKNOWN_TOKEN,) * 4
    assert len(first.itl_ms) == 2
    assert load.outcomes[0].prompt_tokens == 9
    assert [body["prompt"] for body in server.bodies] == ["hello", "helloabcd and on"]
    assert {body["model"] for body in server.bodies} == {"plain"}
    assert set(server.tokens) == {"Bearer secret"}


async def test_unknown_tokens_cannot_be_continued() -> None:
    server = PlainServer()
    async with serving(server):
        load = await put_on(server.url, turn(PROMPT), turn(PROMPT))
    assert load.outcomes[0].error is None
    assert isinstance(load.outcomes[1].error, InvalidRequest)
    assert "returns no token ids" in str(load.outcomes[1].error)


@pytest.mark.parametrize(
    ("status", "kind"), [(429, CapacityExceeded), (503, NotReady), (400, InvalidRequest), (500, WorkerLost)]
)
async def test_refusals_are_outcomes(status: int, kind: type[Exception]) -> None:
    server = PlainServer()
    async with serving(server):
        server.refuses = status
        (outcome,) = (await put_on(server.url, turn(PROMPT))).outcomes
    assert type(outcome.error) is kind
    assert f"answered {status}: not now" in str(outcome.error)
    assert getattr(outcome.error, "retry_after_s", None) == (3.0 if status in (429, 503) else None)


async def test_broken_and_late_answers_are_outcomes() -> None:
    server = PlainServer()
    async with serving(server):
        server.breaks = True
        (broken,) = (await put_on(server.url, turn(PROMPT))).outcomes
        server.hangs = True
        (late,) = (await put_on(server.url, turn(PROMPT), timeout_s=0.3)).outcomes
    assert isinstance(broken.error, WorkerLost)
    assert "before the last token" in str(broken.error)
    assert isinstance(late.error, DeadlineExceeded)


def test_bench_on_a_plain_server(pdserve: Any, tmp_path: Any) -> None:
    server = PlainServer()
    with running(server):
        arguments = ("bench", "--openai-url", server.url, "--requests", "4", "--input-len", "20", "--output-len", "4")
        ran = pdserve(*arguments, "--output", str(tmp_path), "--json")
    assert ran.code == 0, ran.err
    assert ran.json["requests"] == 4
    assert ran.json["failed"] == 0
    assert ran.json["leaked_blocks"] is None
    assert ran.json["output_tokens_per_s"] > 0
    (rows,) = tmp_path.glob("bench/*/requests.jsonl")
    assert {json.loads(line)["token_hash"] for line in rows.read_text().splitlines()} == {""}


def test_a_token_is_not_sent_to_another_host_in_clear() -> None:
    with pytest.raises(InvalidRequest, match="token: it would travel to h:1 unencrypted"):
        OpenAIServer("http://h:1", {"token": "x"})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--openai-url", "http://127.0.0.1:9"], 1, "error: the server at 127.0.0.1:9 does not answer"),
        (["--openai-url", "127.0.0.1:9"], 2, "error: openai_url: '127.0.0.1:9' is not of the form http://HOST:PORT"),
        (["--openai-url", "http://h/v2"], 2, "error: openai_url: 'http://h/v2' is not of the form"),
        (["--openai-url", "https://h:1", "--ca", "/no/such"], 2, "error: ca: /no/such"),
        (["--openai-url", "http://h:1", "--mode", "pd"], 2, "error: mode: a server with OpenAI's API has no modes"),
    ],
)
def test_mistakes_are_one_line(pdserve: Any, arguments: list[str], code: int, message: str) -> None:
    ran = pdserve("bench", *arguments)
    assert ran.code == code
    assert message in ran.err
    assert ran.err.count("\n") == 1
