from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.gateway.conftest import PATIENT, Service, StartService, build_byte_level, services
from tests.local_cluster import free_port

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{# <tool_call> #}"
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass
class Http:
    """A service with fake workers, and an HTTP client for it."""

    service: Service
    client: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.gateway.http_port}"

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        answer = await self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def events(self, path: str, **body: Any) -> list[str]:
        """The data of all events of a stream."""
        answer = await self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]


StartHttp = Callable[..., Awaitable[Http]]


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return build_byte_level(tmp_path_factory.mktemp("chat"), config)


@contextlib.asynccontextmanager
async def https(start_service: StartService, chat_folder: Path) -> AsyncIterator[StartHttp]:
    """Starts services with clients, which are closed at the end."""
    clients = []

    async def start(
        *workers: str, folder: Path | None = chat_folder, gateway: dict[str, Any] | None = None, **options: Any
    ) -> Http:
        ports = {"host": "127.0.0.1", "port": 0, "http_port": free_port()}
        service = await start_service(*workers, folder=folder, gateway={**ports, **(gateway or {})}, **options)
        client = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{service.gateway.http_port}",
            timeout=20,
            headers={"content-type": "application/json"},
        )
        clients.append(client)
        return Http(service, client)

    try:
        yield start
    finally:
        for client in clients:
            await client.aclose()


@pytest.fixture
async def start_http(start_service: StartService, chat_folder: Path) -> AsyncIterator[StartHttp]:
    async with https(start_service, chat_folder) as start:
        yield start


shared = pytest.mark.asyncio(loop_scope="module")
"""Of tests with the fixture `shared_http`: it runs on an event loop of the module."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service_of_module(chat_folder: Path) -> AsyncIterator[Http]:
    async with services(chat_folder) as start_service, https(start_service, chat_folder) as start:
        yield await start("p0", "d0", router=PATIENT)


@pytest.fixture
def shared_http(service_of_module: Http) -> Http:
    """A service of one pair for all tests of a module that leave nothing behind."""
    for worker in service_of_module.service.fleet.values():
        worker.requests.clear()
    return service_of_module


@pytest.fixture
async def http(start_http: StartHttp) -> Http:
    """A service of one pair."""
    return await start_http("p0", "d0", router=PATIENT)
