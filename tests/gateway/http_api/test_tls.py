"""TLS of a real gateway, with and without certificates of clients, over both APIs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from pdserve import AsyncClient, Client, NotReady
from tests.certificates import Certificates
from tests.gateway.conftest import Service, StartService
from tests.local_cluster import free_port

PROMPT = [1, 2, 3]
StartTls = Callable[..., Any]


@pytest.fixture
def start_tls(start_service: StartService, certificates: Certificates) -> StartTls:
    async def start(**gateway: Any) -> Service:
        tls = {"tls_cert": str(certificates.server.cert), "tls_key": str(certificates.server.key)}
        ports = {"host": "127.0.0.1", "port": 0, "http_port": free_port()}
        return await start_service("p0", "d0", gateway={**ports, **tls, **gateway})

    return start


def target(service: Service, host: str = "localhost") -> str:
    return f"https://{host}:{service.gateway.port}"


async def check_served(target: str, **access: Any) -> None:
    """Both clients get an answer."""
    async with AsyncClient(target, **access) as client:
        assert (await client.generate(PROMPT, max_tokens=2).result()).token_ids == (4, 5)
        assert (await client.status()).ready

    def blocking() -> None:
        with Client(target, **access) as client:
            client.wait_ready(10)
            assert client.generate(PROMPT, max_tokens=2).result().token_ids == (4, 5)

    await asyncio.to_thread(blocking)


async def check_refused(target: str, **access: Any) -> None:
    """Neither client gets one, and they say what to look at."""
    async with AsyncClient(target, **access) as client:
        with pytest.raises(NotReady):
            await client.generate(PROMPT, max_tokens=2, timeout_s=5).result()

    def blocking() -> None:
        with Client(target, **access) as client, pytest.raises(NotReady) as caught:
            client.generate(PROMPT, max_tokens=2, timeout_s=5).result()
        assert "TLS" in str(caught.value) or "certificate" in str(caught.value)

    await asyncio.to_thread(blocking)


async def test_clients_encrypt_and_check_the_service(start_tls: StartTls, certificates: Certificates) -> None:
    service = await start_tls()
    for host in ("localhost", "127.0.0.1"):
        await check_served(target(service, host), ca=certificates.ca)
    await check_served(f"localhost:{service.gateway.port}", ca=str(certificates.ca))
    await check_served(f"grpcs://localhost:{service.gateway.port}", tls=True, ca=certificates.ca)
    await check_refused(target(service))  # not of a public authority
    await check_refused(target(service), ca=certificates.stranger.cert)
    await check_refused(f"localhost:{service.gateway.port}")


async def test_clients_without_a_certificate_are_not_let_in(start_tls: StartTls, certificates: Certificates) -> None:
    service = await start_tls(tls_client_ca=str(certificates.ca))
    known = {"cert": certificates.client.cert, "key": certificates.client.key}
    stranger = {"cert": certificates.stranger.cert, "key": certificates.stranger.key}
    await check_served(target(service), ca=certificates.ca, **known)
    await check_refused(target(service), ca=certificates.ca)
    await check_refused(target(service), ca=certificates.ca, **stranger)
    assert not [call for worker in service.fleet.values() for call in worker.requests[4:]]


def context(certificates: Certificates, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=certificates.ca)
    if cert is not None:
        made.load_cert_chain(cert, key)
    return made


async def test_http_is_encrypted_with_the_same_certificate(start_tls: StartTls, certificates: Certificates) -> None:
    service = await start_tls()
    url = f"https://localhost:{service.gateway.http_port}"
    async with httpx2.AsyncClient(base_url=url, verify=context(certificates), timeout=20) as client:
        assert (await client.get("/health")).status_code == 200
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=client) as openai_client:
            stream = await openai_client.completions.create(model="fake", prompt=PROMPT, max_tokens=3, stream=True)
            assert len([event async for event in stream]) == 3
    async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")
    async with httpx2.AsyncClient(base_url=url.replace("https", "http"), timeout=20) as client:
        with pytest.raises(httpx2.HTTPError):
            await client.get("/health")


async def test_http_asks_for_the_clients_certificate(start_tls: StartTls, certificates: Certificates) -> None:
    service = await start_tls(tls_client_ca=str(certificates.ca))
    url = f"https://localhost:{service.gateway.http_port}"
    known, stranger = certificates.client, certificates.stranger
    async with httpx2.AsyncClient(base_url=url, verify=context(certificates, known.cert, known.key)) as client:
        assert (await client.get("/v1/models")).status_code == 200
    for verify in (context(certificates), context(certificates, stranger.cert, stranger.key)):
        async with httpx2.AsyncClient(base_url=url, verify=verify) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get("/v1/models")
