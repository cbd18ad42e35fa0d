"""Servers that speak the protocol of vLLM 0.32 with NixlConnector as it was recorded from real ones: what they are
asked, what they answer, and how they fail. Their model's next token is a function of the tokens before, as the KV has
them, so wrong KV gives wrong tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvicorn
import xxhash
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 16, 64, 200
BLOCK_BYTES = 5 * 2 * 2 * 32 * 2 * BLOCK_SIZE  # of the model tiny in bfloat16
STEP_S = 0.001


def next_token(kv: list[int]) -> int:
    """What the model samples after tokens whose KV it has."""
    return 3 + xxhash.xxh3_64_intdigest(json.dumps(kv).encode()) % (VOCABULARY - 3)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the model outputs."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class RecordedVLLM:
    """One server. ``peers`` are the servers that it can fetch KV from, by engine id. The other attributes are faults,
    which may be set at any time."""

    name: str
    version: str = "0.32.0"
    block_size: int = BLOCK_SIZE
    peers: dict[str, RecordedVLLM] = field(default_factory=dict)
    has_connector: bool = True  # shows the connector's metrics
    drops_params: bool = False  # answers without kv_transfer_params, as without --kv-transfer-config
    ignores_params: bool = False  # computes the prompt itself, as with kv_load_failure_policy: recompute
    lease_over: bool = False  # the KV is gone when decode asks for it
    serves_wrong_blocks: bool = False  # gives the KV of other tokens, with status 200
    hangs: bool = False  # accepts requests and never answers
    breaks_after: int | None = None  # ends the next streamed answer after so many tokens
    refuses: tuple[int, str] | None = None  # status and message
    tells_cached: bool = False  # with --enable-prompt-tokens-details; it says that one block was cached
    start_s: float = 1.0
    kv: dict[str, list[int]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    source: dict[str, int] = field(
        default_factory=lambda: {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    )
    bytes_moved: int = 0
    running: int = 0
    usage: float = 0.0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(lambda: None)
        app.get("/version")(lambda: {"version": self.version})
        app.get("/v1/models")(self._models)
        app.get("/metrics")(self._metrics)
        app.post("/v1/completions")(self._complete)
        return app

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "recorded", "object": "model", "max_model_len": 512}]}

    async def _metrics(self) -> Response:
        label = 'engine="0",model_name="recorded"'
        lines = [
            f"process_start_time_seconds {self.start_s}",
            f"vllm:num_requests_running{{{label}}} {float(self.running)}",
            f"vllm:num_requests_waiting{{{label}}} 0.0",
            f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}} 0.0',
            f"vllm:kv_cache_usage_perc{{{label}}} {self.usage}",
            *(
                f'vllm:prompt_tokens_by_source_total{{{label},source="{source}"}} {float(count)}'
                for source, count in self.source.items()
            ),
            *([f"vllm:nixl_bytes_transferred_sum{{{label}}} {float(self.bytes_moved)}"] if self.has_connector else []),
            f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="0",'
            f'num_gpu_blocks="{NUM_BLOCKS}"}} 1.0',
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _complete(self, request: Request) -> Response:
        body, request_id = await request.json(), request.headers["X-Request-Id"]
        self.requests.append({**body, "id": request_id})
        if self.refuses is not None:
            status, message = self.refuses
            return JSONResponse({"error": {"message": message, "type": "BadRequest", "code": status}}, status)
        assert body["return_token_ids"] is True
        if self.hangs:
            await asyncio.sleep(3600)
        return await self._answer(body, request_id)

    async def _answer(self, body: dict[str, Any], request_id: str) -> Response:
        params = body.get("kv_transfer_params") or {}
        prompt: list[int] = body["prompt"]
        if not body["stream"]:
            assert params["do_remote_decode"] is True
            assert body["max_tokens"] == 1
            assert "stream_options" not in body
            self.source["local_compute"] += len(prompt)
            self.kv[request_id] = prompt
            token = next_token(prompt)
            choice = self._choice([token], "stop" if token in body["stop_token_ids"] else "length")
            usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
            if self.tells_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": self.block_size}
            answer = {"id": f"cmpl-{request_id}", "choices": [choice], "usage": usage}
            if not self.drops_params:
                answer["kv_transfer_params"] = {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_block_ids": [list(range(1, 1 + -(-len(prompt) // self.block_size)))],
                    "remote_engine_id": self.name,
                    "remote_request_id": request_id,
                    "remote_host": "127.0.0.1",
                    "remote_port": 5559,
                    "tp_size": 1,
                    "remote_num_tokens": len(prompt),
                }
            return JSONResponse(answer)
        kv, failure = list(prompt), ""
        if params.get("do_remote_prefill") and not self.ignores_params:
            peer = self.peers.get(params["remote_engine_id"])
            found = None if peer is None or peer.lease_over else peer.kv.pop(params["remote_request_id"], None)
            if found is None:
                failure = "Internal server error"  # its log says that the KV could not be loaded
            else:
                kv = [token + 1 for token in found] if peer is not None and peer.serves_wrong_blocks else list(found)
                self.source["external_kv_transfer"] += len(prompt)
                self.bytes_moved += -(-len(prompt) // self.block_size) * BLOCK_BYTES
        else:
            self.source["local_compute"] += len(prompt)
        return StreamingResponse(self._parts(kv, body, failure, request_id), media_type="text/event-stream")

    async def _parts(self, kv: list[int], body: dict[str, Any], failure: str, request_id: str) -> AsyncIterator[str]:
        count, stops = body["max_tokens"], body["stop_token_ids"]
        self.running += 1
        try:
            if failure:
                yield event({"error": {"message": failure, "type": "InternalServerError", "code": 500}})
            else:
                for number in range(1, count + 1):
                    if self.breaks_after is not None and number > self.breaks_after:
                        self.breaks_after = None
                        return
                    await asyncio.sleep(STEP_S)
                    kv.append(next_token(kv))
                    reason = "stop" if kv[-1] in stops else "length" if number == count else None
                    yield event({"choices": [self._choice(kv[-1:], reason)]})
                    if reason is not None:
                        break
                if (body.get("stream_options") or {}).get("include_usage"):
                    usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
                    if self.tells_cached:
                        usage["prompt_tokens_details"] = {"cached_tokens": self.block_size}
                    yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            self.running -= 1

    @staticmethod
    def _choice(tokens: list[int], reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": reason, "token_ids": tokens}


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class App(Protocol):
    """A server: what it serves, and the port, once it is served."""

    port: int

    @property
    def url(self) -> str:
        """Where it is served."""
        ...

    def app(self) -> FastAPI:
        """A new app."""


@contextlib.asynccontextmanager
async def serving(*servers: App) -> AsyncIterator[None]:
    """Serve on free ports of loopback."""
    running = []
    for server in servers:
        config = uvicorn.Config(server.app(), host="127.0.0.1", port=server.port, log_level="error", lifespan="off")
        listener = uvicorn.Server(config)
        listener.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(listener._serve())
        while not listener.started:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        server.port = listener.servers[0].sockets[0].getsockname()[1]
        running.append((listener, task))
    try:
        yield
    finally:
        for listener, task in running:
            listener.should_exit = listener.force_exit = True
            await task


@contextlib.contextmanager
def running(*servers: App) -> Iterator[None]:
    """Serve on a thread, on free ports of loopback."""
    loop, ready, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(*servers):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(10.0)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
