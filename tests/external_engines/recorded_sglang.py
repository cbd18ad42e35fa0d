"""Servers that speak SGLang's protocol of prefill and decode servers, as its sources describe it, with the model of
`tests.external_engines.recorded_vllm`. Both requests of a hand-off meet in a room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from tests.external_engines.recorded_vllm import STEP_S, next_token

MEET_S = 5.0
POOL_TOKENS = 2048


@dataclass(eq=False)
class Room:
    """Where the two requests of a hand-off meet: the tokens whose KV prefill has, and whether decode took it."""

    kv: asyncio.Future[list[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    taken: asyncio.Event = field(default_factory=asyncio.Event)


Rooms = dict[tuple[int, int], Room]
"""By bootstrap port and number."""


class DistantRooms(Rooms):
    """Rooms of prefill servers in other processes of this host, as a decode server sees them."""

    def setdefault(self, key: tuple[int, int], default: Room) -> Room:
        """The room, whose KV is fetched from its prefill server."""
        if key not in self:
            self[key] = default
            self._fetching = asyncio.create_task(self._fetch(key, default))
        return self[key]

    @staticmethod
    async def _fetch(key: tuple[int, int], room: Room) -> None:
        async with httpx2.AsyncClient(trust_env=False, timeout=MEET_S) as http:
            room.kv.set_result((await http.get(f"http://127.0.0.1:{key[0]}/{key[1]}")).json())


@dataclass(eq=False)
class RecordedSGLang:
    """One server. ``rooms`` are shared by those that hand KV to each other. The other attributes are faults and
    options, which may be set at any time."""

    mode: str
    rooms: Rooms = field(default_factory=dict)
    version: str = "0.5.9"
    page_size: int = 1
    bootstrap_port: int = 8998
    seed: int = 1
    incremental: bool = False  # --incremental-streaming-output
    has_metrics: bool = True  # --enable-metrics
    key: str = ""  # --api-key
    loses_kv: bool = False  # the transfer fails, at both ends
    hangs: bool = False
    breaks_after: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI(dependencies=[Depends(self._check)])
        app.get("/server_info")(self._info)
        app.get("/metrics")(self._metrics)
        app.post("/generate")(self._generate)
        return app

    def _check(self, request: Request) -> None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise HTTPException(401)

    def bootstrap(self) -> FastAPI:
        """What a prefill server has at its bootstrap port, for decode servers in other processes."""
        app = FastAPI()
        app.get("/{number}")(self._hand_over)
        return app

    async def _hand_over(self, number: int) -> list[int]:
        room = self.rooms.setdefault((self.bootstrap_port, number), Room())
        kv = await room.kv
        room.taken.set()
        return kv

    def _info(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "served_model_name": "recorded",
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": self.bootstrap_port,
            "page_size": self.page_size,
            "kv_cache_dtype": "auto",
            "context_length": None,
            "max_req_input_len": 506,
            "max_total_num_tokens": POOL_TOKENS,
            "random_seed": self.seed,
            "startup_time": {"total": 1.5},
            "internal_states": [{}],
        }

    def _metrics(self) -> Response:
        if not self.has_metrics:
            return Response(status_code=404)
        label = 'engine_type="unified",model_name="recorded",tp_rank="0"'
        values = {"num_running_reqs": self.running, "num_queue_reqs": 0, "token_usage": 0.0, "gen_throughput": 1.0}
        lines = [f"sglang:{name}{{{label}}} {float(value)}" for name, value in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.hangs:
            await asyncio.sleep(3600)
        assert ("bootstrap_room" in body) == (self.mode != "null")
        if self.mode != "prefill":
            return StreamingResponse(self._parts(body), media_type="text/event-stream")
        assert body["stream"] is False
        room, prompt = self._room(body), body["input_ids"]
        room.kv.set_result(prompt)
        try:
            async with asyncio.timeout(MEET_S):
                await room.taken.wait()
        except TimeoutError:
            return JSONResponse({"error": {"message": "Prefill bootstrap failed", "code": 500}}, 500)
        reason = {"type": "length", "length": 0}
        return JSONResponse(self._part([next_token(prompt)], 1, reason, body))

    def _room(self, body: dict[str, Any]) -> Room:
        assert body["bootstrap_host"] == "127.0.0.1"
        return self.rooms.setdefault((body["bootstrap_port"], body["bootstrap_room"]), Room())

    async def _parts(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        try:
            kv = list(body["input_ids"])
            if self.mode == "decode":
                room = self._room(body)
                kv = list(await room.kv)
                if self.loses_kv:
                    failed = {"type": "abort", "message": "Decode transfer failed", "status_code": 500}
                    yield _event(self._part([], 0, failed, body))
                    return
                room.taken.set()
            params, outputs = body["sampling_params"], []
            for number in range(1, params["max_new_tokens"] + 1):
                if self.breaks_after is not None and number > self.breaks_after:
                    self.breaks_after = None
                    return
                await asyncio.sleep(STEP_S)
                kv.append(next_token(kv))
                outputs.append(kv[-1])
                stops = kv[-1] in params["stop_token_ids"]
                reason: dict[str, Any] | None = {"type": "stop", "matched": kv[-1]} if stops else None
                if number == params["max_new_tokens"] and not stops:
                    reason = {"type": "length", "length": number}
                given = outputs[-1:] if self.incremental else outputs
                yield _event(self._part(given, number, reason, body))
                if stops:
                    break
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled.append(body["rid"])
            raise
        finally:
            self.running -= 1

    @staticmethod
    def _part(tokens: list[int], count: int, reason: dict[str, Any] | None, body: dict[str, Any]) -> dict[str, Any]:
        about = {"id": body["rid"], "finish_reason": reason, "completion_tokens": count, "cached_tokens": 0}
        return {"text": "", "output_ids": tokens, "meta_info": about}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
