"""What clients do to their connections: raw sockets, half requests, and readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.http_api import server
from tests.gateway.fuzzing import ANSWER_S, check_alive
from tests.gateway.http_api.conftest import Http, StartHttp

PATH = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}

JSON_TYPE = "content-type: application/json"
CHUNKED = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n{JSON_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n".encode()

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(body: dict[str, Any], *headers: str, path: str = PATH) -> bytes:
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1", "host: localhost", JSON_TYPE, f"content-length: {len(data)}", *headers, "", "")
    return "\r\n".join(head).encode() + data


@contextlib.asynccontextmanager
async def connected(http: Http, receive_bytes: int = 0) -> AsyncIterator[Streams]:
    """A raw connection. With ``receive_bytes``, of about so many that are not read, few are taken."""
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", http.service.gateway.http_port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=receive_bytes or 2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(ANSWER_S):
            while data := await reader.read(2**16):
                found += data
    return found


async def sent(http: Http, data: bytes, *, eof: bool = False) -> bytes:
    """The answer to these bytes, until the server closes."""
    async with connected(http) as (reader, writer):
        writer.write(data)
        if eof:
            writer.write_eof()
        return await rest(reader)


def refusal(answer: bytes) -> tuple[int, str]:
    """The status and the field of a refusal, whose shape is checked."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{error['param']}: ")
    return int(head.split()[1]), error["param"]


def accepted(http: Http) -> list[Any]:
    served = http.service.gateway._http
    assert served is not None
    return list(served.server_state.connections)


def connections_of(http: Http) -> int:
    return len(accepted(http))


async def all_closed(http: Http) -> None:
    """Wait until the server has forgotten all connections but those of the fixture's client."""
    await http.client.aclose()
    await http.service.until(lambda: connections_of(http) == 0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time that a test can wait for."""
    monkeypatch.setattr(server, "LOOK_S", 0.05)
    monkeypatch.setattr(server, "RECEIVE_S", 0.3)
    monkeypatch.setattr(server, "IDLE_S", 0.6)
    monkeypatch.setattr("gateway.failures.SEND_FAILURE_S", 0.3)


NO_HTTP = [
    b"garbage\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/7.7\r\nhost: localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}\r\n",
    b"GET /health HTTP/1.1\r\na\x00b: c\r\n\r\n",
]


async def test_what_is_no_http_is_refused_like_everything_else(http: Http) -> None:
    for data in NO_HTTP:
        assert refusal(await sent(http, data)) == (400, "request"), data
        await check_alive(http.service)


async def test_a_route_there_is_not_with_a_host_there_is_not(start_http: StartHttp) -> None:
    http = await start_http("p0", "d0", gateway={"allowed_hosts": ["*"]})
    for host in ("[", "[::1", "a b", "", "\xff", "x:99999", "//"):
        lines = f"GET /nowhere HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert refusal(await sent(http, lines.encode("latin-1"))) == (404, "path"), host


async def test_paths_are_not_completed(http: Http) -> None:
    for path in ("/health/", "/v1/completions/", "/v1//models", "/../etc/passwd", "/v1/models/%00", "/v1/models/"):
        answer = await http.client.get(path)
        code = "UnknownModel" if path.startswith("/v1/models/") else "UnknownPath"
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
        assert code == "UnknownModel" or "GET /docs shows those that are served" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("data", [b"G", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-le"])
async def test_a_head_that_does_not_end(http: Http, data: bytes) -> None:
    assert refusal(await sent(http, data)) == (408, "request")


@pytest.mark.usefixtures("impatient")
async def test_a_head_drop_by_drop(http: Http) -> None:
    async with connected(http) as (reader, writer):
        answer = asyncio.create_task(rest(reader))
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            while not answer.done():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        # A client that is still sending may lose the answer to the end of its connection.
        assert not await answer or refusal(await answer) == (408, "request")
    await all_closed(http)


@pytest.mark.usefixtures("impatient")
async def test_a_connection_without_a_request(http: Http) -> None:
    assert await sent(http, b"") == b""
    assert (await sent(http, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "start",
    [
        b"GET /" + b"x" * 1000,
        b"GET /health HTTP/1.1\r\nlong: ",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\ntrailer: ",
    ],
)
async def test_a_head_of_any_length(http: Http, start: bytes) -> None:
    async with connected(http) as (reader, writer):
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"x" * 2**16)
                await asyncio.wait_for(writer.drain(), ANSWER_S)
        answer = await rest(reader)
    assert not answer or refusal(answer) == (431, "headers")
    await check_alive(http.service)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("drips", [False, True])
async def test_a_body_that_never_ends(start_http: StartHttp, drips: bool) -> None:
    http = await start_http("p0", "d0", gateway={"default_timeout_s": 0.4})
    async with connected(http) as (reader, writer):
        writer.write(CHUNKED + b"1\r\n{\r\n")
        answer = asyncio.create_task(rest(reader))  # at once: a reset drops what is not read
        with contextlib.suppress(ConnectionError):
            while drips and not answer.done():
                writer.write(b"1\r\n \r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        assert refusal(await answer) == (408, "body")
    await all_closed(http)
    await check_alive(http.service)


@pytest.mark.usefixtures("impatient")
async def test_a_body_that_goes_on_after_its_refusal(http: Http) -> None:
    async with connected(http) as (reader, writer):
        writer.write(CHUNKED)
        chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
        answer = asyncio.create_task(rest(reader))
        with contextlib.suppress(ConnectionError):
            while not answer.done():
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), ANSWER_S)
                await asyncio.sleep(0.001)
        assert not (await answer) or refusal(await answer) == (413, "body")
    await all_closed(http)


async def test_pipelined_requests_are_answered_in_their_order(http: Http) -> None:
    ids = [f"r{index}" for index in range(8)]
    data = b"".join(post({**BODY, "request_id": each}) for each in ids)
    async with connected(http) as (reader, writer):
        writer.write(data)
        got = []
        for _ in ids:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_S)
            (length,) = [line.split()[1] for line in head.lower().splitlines() if line.startswith(b"content-length")]
            got.append(json.loads(await reader.readexactly(int(length)))["id"])
    assert got == ids
    await check_alive(http.service)


@pytest.mark.parametrize("data", [post(BODY) * (server.MAX_PIPELINED + 2), post(BODY) + b"garbage\r\n\r\n"])
async def test_more_than_the_pipe_takes_and_what_is_no_http_behind_a_request(http: Http, data: bytes) -> None:
    http.service.fleet["d0"].hangs.add("decode_step")
    assert await sent(http, data) == b"", "no answer that could pass for the request's"
    await http.service.until(lambda: http.service.gateway.router.running == 0 and http.service.is_idle)
    http.service.fleet["d0"].hangs.clear()
    await check_alive(http.service)


@pytest.mark.parametrize("data", [post(BODY), post(BODY)[:-5], post(BODY)[:30], b"", post({**BODY, "stream": True})])
async def test_half_closed_sockets(http: Http, data: bytes) -> None:
    """A client that closes its side has left, as far as a server can tell."""
    http.service.fleet["d0"].delay_s["decode_step"] = 0.2
    await sent(http, data, eof=True)
    http.service.fleet["d0"].delay_s.clear()
    await check_alive(http.service)


LONG: dict[str, Any] = {
    "prompt": [5], "n": 128, "max_tokens": 250, "stream": True, "return_token_ids": True, "request_id": "long",
    "stream_options": {"continuous_usage_stats": True},
}  # fmt: skip
"""An answer of more than a connection holds unread."""


async def test_a_reader_that_stops_stops_nobody_else(http: Http) -> None:
    async with connected(http, receive_bytes=4096) as (reader, writer):
        writer.write(post(LONG))
        assert (await asyncio.wait_for(reader.readline(), ANSWER_S)).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            answer = await asyncio.wait_for(http.complete(**BODY), ANSWER_S)
            assert answer["usage"]["completion_tokens"] == 2
        assert any(each.startswith("long-") for _, each in http.service.gateway._inference._claims), "it waits"
    await check_alive(http.service)


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_stops_for_good(http: Http) -> None:
    async with connected(http, receive_bytes=4096) as (reader, writer):
        writer.write(post({**LONG, "pdserve": {"timeout_s": 5.0}}))
        assert (await asyncio.wait_for(reader.readline(), ANSWER_S)).startswith(b"HTTP/1.1 200")
        await http.service.until(lambda: not http.service.gateway._inference._claims)
        await all_closed(http)
    await check_alive(http.service)
