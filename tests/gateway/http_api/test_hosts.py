"""What web pages of other sites could send: calls for other hosts, and bodies that are not said to be JSON."""

from __future__ import annotations

import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.security import security_of
from pdserve.core.clock import FakeClock
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ConfigError
from tests.certificates import Certificates
from tests.gateway.http_api.conftest import Http, StartHttp, shared
from tests.gateway.http_api.test_connections import sent
from tests.gateway.test_callers import entry, save

PATH = "/v1/completions"
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()
OWN = socket.gethostname()
RIGHT = [
    "localhost", "LocalHost.", "app.localhost", "127.0.0.1", "127.9.9.9", "10.1.2.3", "[::1]", "[fe80::1%eth0]", OWN,
    OWN.upper(),
]  # fmt: skip
WRONG = [
    "rebound.example", "localhost.example", "127.0.0.1.example", "127.1", ".localhost.example", "[::1", "::1", "a b",
    "127.0.0.1@rebound.example", f"{OWN}.example", "\xff", "//",
]  # fmt: skip
ROUTES = [("GET", "/"), ("GET", "/health"), ("GET", "/nowhere"), ("POST", PATH)]


async def asked_for(http: Http, host: str, method: str = "POST", path: str = PATH) -> httpx2.Response:
    """The answer to a call with this header Host."""
    return await http.client.request(method, path, headers={b"host": host.encode("latin-1")}, content=BODY)


@shared
@pytest.mark.parametrize("port", ["", ":8000", ":"])
async def test_addresses_and_the_services_own_names_are_served(shared_http: Http, port: str) -> None:
    for host in RIGHT:
        assert (await asked_for(shared_http, host + port)).status_code == 200, host
    lines = b"POST %s HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    for head in (lines, lines.replace(b"1.0\r\n", b"1.0\r\nhost:\r\n")):
        answer = await sent(shared_http, head % (PATH.encode(), len(BODY), BODY))
        assert answer.startswith(b"HTTP/1.1 200"), "no browser leaves Host out"


@shared
@pytest.mark.parametrize("host", WRONG)
async def test_other_hosts_are_refused(shared_http: Http, host: str) -> None:
    for method, path in ROUTES:
        for port in ("", ":8000"):
            answer = await asked_for(shared_http, host + port, method, path)
            assert answer.status_code == 403, (path, answer.text)
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("host", "HostNotAllowed")
            assert error["message"].endswith("use its address, or add the name to gateway.allowed_hosts")
    assert not any(worker.requests for worker in shared_http.service.fleet.values())
    assert 'pdserve_requests_failed_total{reason="HostNotAllowed"}' in (await shared_http.client.get("/metrics")).text


@shared
async def test_one_wrong_host_of_two_is_refused(shared_http: Http) -> None:
    lines = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: rebound.example\r\nconnection: close\r\n\r\n"
    assert (await sent(shared_http, lines)).startswith(b"HTTP/1.1 403")


async def test_names_can_be_allowed(start_http: StartHttp) -> None:
    http = await start_http("p0", "d0", gateway={"allowed_hosts": ["GPU.example", "head"]})
    for host in ("gpu.example", "gpu.EXAMPLE:8000", "head", "localhost", "127.0.0.1"):
        assert (await asked_for(http, host)).status_code == 200, host
    for host in ("rebound.example", "x.gpu.example", "example"):
        assert (await asked_for(http, host)).status_code == 403, host


@pytest.mark.parametrize("name", ["http://gpu", "gpu:8000", "*.gpu", ".gpu", "", "a b", "[::1]"])
def test_what_is_no_name_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.allowed_hosts"):
        PdserveConfig.parse({"gateway": {"allowed_hosts": ["gpu.example", name]}})


def test_the_name_that_it_listens_on_is_its_own() -> None:
    config = PdserveConfig.parse({"gateway": {"host": "GPU.example", "insecure": True, "allowed_hosts": ["head"]}})
    names = security_of(config.gateway, FakeClock()).host_names
    assert names == frozenset({"gpu.example", "head", OWN.lower()})


async def test_any_name_is_right_where_a_page_is_kept_out_otherwise(
    start_http: StartHttp, tmp_path: Path, certificates: Certificates
) -> None:
    tokens = await start_http("p0", "d0", gateway={"tokens": str(save(tmp_path / "tokens", entry("a", "good")))})
    answers = [
        await tokens.client.post(
            PATH, content=BODY, headers={"host": "gpu.example", "authorization": f"Bearer {token}"}
        )
        for token in ("good", "wrong")
    ]
    assert [answer.status_code for answer in answers] == [200, 401]
    every = await start_http("p0", "d0", gateway={"allowed_hosts": ["*"]})
    assert (await asked_for(every, "rebound.example")).status_code == 200
    files = {"tls_cert": str(certificates.server.cert), "tls_key": str(certificates.server.key)}
    encrypted = await start_http("p0", "d0", gateway=files)
    url = f"https://localhost:{encrypted.service.gateway.http_port}"
    verify = ssl.create_default_context(cafile=certificates.ca)
    async with httpx2.AsyncClient(base_url=url, verify=verify) as client:
        answer = await client.get("/health", headers={"host": "gpu.example"})
        assert answer.status_code == 200


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
async def test_other_content_types_are_refused(shared_http: Http) -> None:
    async with httpx2.AsyncClient(base_url=shared_http.url) as client:
        for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
            for kind in (None, *SIMPLE_TYPES):
                headers = {} if kind is None else {"content-type": kind}
                answer = await client.post(path, content=BODY, headers=headers)
                assert answer.status_code == 415, (path, kind, answer.text)
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
