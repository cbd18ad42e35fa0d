"""Servers of vLLM with MooncakeConnector behind the real gateway: recorded ones, which meet by names of transfers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from checkpoints.source import resolve_model
from external_engines import vllm_mooncake, vllm_server
from external_engines.launch import Place
from pdserve import LayoutMismatch
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from tests.external_engines.recorded_vllm import RecordedVLLM, next_token, serving
from tests.external_engines.served import EXPECTED, PROMPT, Service, service_of
from tests.external_engines.test_started_servers import config_of, spec_of


@dataclass(eq=False)
class RecordedMooncake(RecordedVLLM):
    """One server, as vLLM's sources describe it. ``transfers`` are those of all servers, by name."""

    transfers: dict[str, asyncio.Future[list[int]]] = field(default_factory=dict)

    def _transfer(self, params: dict[str, Any]) -> asyncio.Future[list[int]]:
        made = asyncio.get_running_loop().create_future()
        return self.transfers.setdefault(params["transfer_id"], made)

    async def _answer(self, body: dict[str, Any], request_id: str) -> Response:
        params, prompt = body.get("kv_transfer_params") or {}, body["prompt"]
        if params.get("do_remote_decode"):
            assert body["max_tokens"] == 1
            assert not body["stream"]
            if not self.lease_over:
                self._transfer(params).set_result([token + self.serves_wrong_blocks for token in prompt])
            self.source["local_compute"] += len(prompt)
            return JSONResponse({"choices": [self._choice([next_token(prompt)], "length")]})
        kv, failure = list(prompt), ""
        if params.get("do_remote_prefill") and not self.ignores_params:
            assert params["remote_engine_id"] in self.peers
            assert params["remote_bootstrap_addr"].startswith("http://127.0.0.1:")
            try:
                async with asyncio.timeout(0.5):
                    kv = list(await self._transfer(params))
                self.source["external_kv_transfer"] += len(prompt)
            except TimeoutError:
                failure = "Internal server error"
        else:
            self.source["local_compute"] += len(prompt)
        return StreamingResponse(self._parts(kv, body, failure, request_id), media_type="text/event-stream")


@dataclass(eq=False)
class Bootstrap:
    """The bootstrap port of a prefill server, ``engine_id``. It answers ``fails`` calls with an error."""

    engine_id: str
    fails: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/query")(self._query)
        return app

    def _query(self) -> Response:
        if self.fails:
            self.fails -= 1
            return JSONResponse({}, 503)
        return JSONResponse({"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://h:1"}}}})


@asynccontextmanager
async def service(
    monkeypatch: pytest.MonkeyPatch, *, failing: int = 0, **faults: object
) -> AsyncIterator[Service[RecordedMooncake]]:
    prefill, decode = RecordedMooncake("engine-p", has_connector=False), RecordedMooncake("d", has_connector=False)
    decode.peers, decode.transfers = {"engine-p": prefill}, prefill.transfers
    bootstrap = Bootstrap("engine-p", failing)
    async with serving(bootstrap):
        monkeypatch.setattr(vllm_mooncake, "_DEFAULT_PORT", bootstrap.port)
        async with service_of(prefill, decode, ("worker.connector", "mooncake"), **faults) as served:
            yield served


async def test_a_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert (result.transport, result.kv_bytes, result.kv_bytes_expected) == ("", 0, 0)  # it counts no bytes
        assert [link.transport for link in served.workers()["prefill-0"].links] == ["mooncake"]
        (asked,), (told,) = served.prefill.requests, served.decode.requests
        assert asked["kv_transfer_params"]["transfer_id"] == told["kv_transfer_params"]["transfer_id"]
        assert list((await served.generate("colocated")).token_ids) == EXPECTED
        assert not served.notes()
        assert served.decode.source == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": len(PROMPT)}


async def test_a_decode_that_computes_the_prompt_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch, decode_ignores_params=True) as served:
        assert list((await served.generate()).token_ids) == EXPECTED
        await served.until(lambda: "has computed" in served.notes())


async def test_kv_that_does_not_come_is_an_error_and_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch, prefill_lease_over=True) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert any("it may have failed to fetch the KV" in str(failure) for failure in result.failures)


async def test_wrong_kv_is_noticed_by_the_token_that_both_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch, prefill_serves_wrong_blocks=True) as served:
        result = await served.generate()
        assert list(result.token_ids) == EXPECTED
        assert any("decodes another token 1" in str(failure) for failure in result.failures)


async def test_a_bootstrap_port_that_fails_at_first_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch, failing=2) as served:
        assert list((await served.generate()).token_ids) == EXPECTED


async def test_servers_that_do_not_prefill_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(monkeypatch) as served:
        await served.ready()
    monkeypatch.setattr(vllm_mooncake, "_DEFAULT_PORT", 9)
    prefill, decode = RecordedMooncake("engine-p", has_connector=False), RecordedMooncake("d", has_connector=False)
    async with service_of(prefill, decode, ("worker.connector", "mooncake")) as served:
        await served.until(lambda: len(served.gateway.registry.workers) == 2)
        with pytest.raises(LayoutMismatch, match="was not started for that"):
            await served.client.generate(PROMPT, max_tokens=8, mode="pd", timeout_s=5.0).result()


def test_what_a_server_is_started_with(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"worker.connector": "mooncake"})
    place = Place(tmp_path, "127.0.0.1", 4321)
    launch = vllm_server.launch(spec_of(config, Role.PREFILL, "127.0.0.1:1"), resolve_model("tiny"), place)
    hand_off = json.loads(launch.command[launch.command.index("--kv-transfer-config") + 1])
    assert (hand_off["kv_connector"], hand_off["kv_role"]) == ("MooncakeConnector", "kv_both")
    assert launch.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "4321"
    with pytest.raises(ConfigError, match="pdserve's own engine needs none"):
        config_of(tmp_path, **{"worker.engine": "pdserve", "worker.connector": "mooncake"})
