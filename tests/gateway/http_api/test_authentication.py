"""Tokens on both APIs of a real gateway: who is let in, what of, how often, and whose cached KV is whose."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve import AsyncClient, CapacityExceeded, Client, InvalidRequest, Unauthenticated
from pdserve.pb import inference_pb2 as pb
from pdserve.pb import inference_pb2_grpc
from tests.gateway.http_api.conftest import Http, StartHttp
from tests.gateway.test_callers import entry, save

GOOD, OTHER, EXPIRED = "good-token", "other-token", "expired-token"
PROMPT = [1, 2, 3]
BEARER = {"authorization": f"Bearer {GOOD}"}


@pytest.fixture
def start(start_http: StartHttp, tmp_path: Path) -> StartHttp:
    """Starts services with a file of these tokens."""

    async def begin(*entries: Any, **options: Any) -> Http:
        return await start_http("p0", "d0", gateway={"tokens": str(save(tmp_path / "tokens", *entries))}, **options)

    return begin


@pytest.fixture
async def http(start: StartHttp) -> Http:
    return await start(entry("good", GOOD), entry("other", OTHER), entry("expired", EXPIRED, expires="2020-01-01"))


def target(http: Http) -> str:
    return f"127.0.0.1:{http.service.gateway.port}"


@pytest.mark.parametrize("token", ["", "wrong", EXPIRED])
async def test_wrong_tokens_are_refused_over_grpc(http: Http, token: str) -> None:
    async with AsyncClient(target(http), token=token) as client:
        with pytest.raises(Unauthenticated, match=r"^authorization: "):
            await client.generate(PROMPT, max_tokens=2).result()
        with pytest.raises(Unauthenticated, match=r"^authorization: "):
            await client.status()
        assert await client.ready(), "the health needs none"

    def blocking() -> None:
        with Client(target(http), token=token) as client:
            with pytest.raises(Unauthenticated, match=r"^authorization: "):
                client.generate(PROMPT, max_tokens=2).result()
            with pytest.raises(Unauthenticated, match=r"^authorization: "):
                client.status()
            assert client.ready()

    await asyncio.to_thread(blocking)
    assert not any(worker.requests for worker in http.service.fleet.values())


async def test_grpc_tells_the_status_and_nothing_else(http: Http) -> None:
    """Also of methods that do not exist, of messages that are too long, and of reflection."""
    channel = http.service.channel
    stub = inference_pb2_grpc.InferenceStub(channel)
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    unknown: Any = channel.unary_unary("/pdserve.v1.Inference/Nonsense")
    long = pb.GenerateRequest(text="x" * (3 * 2**20))

    async def all_of(call: Any) -> list[Any]:
        return [message async for message in call]

    callings: tuple[Any, ...] = (
        all_of(stub.Generate(pb.GenerateRequest())),
        all_of(stub.Generate(long)),
        stub.GetStatus(pb.GetStatusRequest()),
        all_of(reflect.ServerReflectionInfo(iter([request]))),
        unknown(b""),
        stub.GetStatus(pb.GetStatusRequest(), metadata=(("authorization", f"Bearer {GOOD}"),) * 2),
    )
    for calling in callings:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calling
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ("pdserve-error", "Unauthenticated") in tuple(caught.value.trailing_metadata() or ())
    metadata = (("authorization", f"Bearer {GOOD}"),)
    names = [s.name async for answer in reflect.ServerReflectionInfo(iter([request]), metadata=metadata)
             for s in answer.list_services_response.service]  # fmt: skip
    assert "pdserve.v1.Inference" in names
    health = health_pb2_grpc.HealthStub(channel)
    watching = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()


ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/health/"),
    ("GET", "/%2Fhealth"),
    ("GET", "/no/such/route"),
]


WRONG: list[dict[str, str]] = [
    {}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {EXPIRED}"}, {"authorization": f"Basic {GOOD}"},
    {"x-api-key": GOOD}, {"authorization": ""},
]  # fmt: skip


async def test_wrong_tokens_are_refused_over_http(http: Http) -> None:
    for headers, (method, path) in itertools.product(WRONG, ROUTES):
        answer = await http.client.request(method, path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "Unauthenticated")
        assert error["message"].startswith("authorization: ")
        assert GOOD not in answer.text
        assert EXPIRED not in answer.text
    for headers, path in itertools.product(WRONG, ("/health", "/healthz", "/docs", "/")):
        assert (await http.client.get(path, headers=headers)).status_code == 200


async def test_the_openai_package_sends_its_key(http: Http) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key=GOOD, max_retries=0) as client:
        answer = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=2)
        assert answer.usage is not None
    async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_refusals_are_counted(http: Http) -> None:
    for _ in range(3):
        await http.client.get("/v1/models")
    text = (await http.client.get("/metrics", headers=BEARER)).text
    assert 'pdserve_requests_failed_total{reason="Unauthenticated"} 3.0' in text


async def limited(start: StartHttp, **limits: int) -> Http:
    return await start(entry("good", GOOD, limits=limits), entry("other", OTHER))


async def complete(http: Http, token: str = GOOD, **body: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {token}"}
    return await http.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body}, headers=headers)


async def test_requests_per_minute_count_over_both_apis(start: StartHttp) -> None:
    http = await limited(start, requests_per_minute=3)
    async with AsyncClient(target(http), token=GOOD) as client:
        assert (await complete(http)).status_code == 200
        await client.generate(PROMPT, max_tokens=2).result()
        assert (await complete(http)).status_code == 200
        answer = await complete(http)
        assert answer.status_code == 429
        assert 15 <= int(answer.headers["retry-after"]) <= 20
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "CapacityExceeded")
        assert error["message"].startswith("requests_per_minute: ")
        with pytest.raises(CapacityExceeded, match=r"^requests_per_minute: ") as caught:
            await client.generate(PROMPT, max_tokens=2).result()
        assert caught.value.retry_after_s is not None
        assert 15 < caught.value.retry_after_s <= 20
        assert (await client.status()).ready, "only requests are counted"
    assert (await complete(http, OTHER)).status_code == 200


async def test_tokens_per_minute_are_those_of_prompts_and_outputs(start: StartHttp) -> None:
    http = await limited(start, tokens_per_minute=60)
    assert (await complete(http, max_tokens=7)).status_code == 200
    answer = await complete(http, prompt=list(range(1, 50)), max_tokens=10)  # 10 + 59: known when it is too late
    assert answer.status_code == 200
    answer = await complete(http)
    assert answer.status_code == 429
    assert 8 <= int(answer.headers["retry-after"]) <= 10
    assert answer.json()["error"]["message"].startswith("tokens_per_minute: ")


async def test_streams_are_counted_while_they_run(start: StartHttp) -> None:
    http = await limited(start, concurrent=2)
    http.service.fleet["d0"].hangs = {"decode"}
    async with AsyncClient(target(http), token=GOOD) as client:
        streams = [client.generate(PROMPT, max_tokens=4) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        answer = await complete(http)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["message"].startswith("concurrent: ")
        with pytest.raises(CapacityExceeded, match=r"^concurrent: "):
            await client.generate(PROMPT, max_tokens=4).result()
        assert (await complete(http, OTHER, max_tokens=1)).status_code == 200
        streams[0].cancel()
        http.service.fleet["d0"].hangs = set()

        async def let_in() -> None:
            while (await complete(http)).status_code != 200:  # noqa: ASYNC110 - the gateway is asked
                await asyncio.sleep(0.01)

        await asyncio.wait_for(let_in(), 20)
        streams[1].cancel()


async def test_callers_do_not_find_each_others_kv(http: Http) -> None:
    """KV is shared within a salt: those of two callers differ whatever they ask for, and over both APIs one caller has
    the same."""
    for salt in ("", "s", "other/s"):
        for token in (GOOD, OTHER):
            assert (await complete(http, token, cache_salt=salt)).status_code == 200
            async with AsyncClient(target(http), token=token) as client:
                await client.generate(PROMPT, max_tokens=2, salt=salt).result()
    calls = http.service.fleet["p0"].requests
    salts = [request.salt for _, request in calls]
    assert len(salts) == 12
    assert all(salts[index] == salts[index + 1] for index in range(0, 12, 2))
    assert len(set(salts)) == 6


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_salts_cannot_be_made_without_the_key_of_the_service(
    start_http: StartHttp, start: StartHttp, with_tokens: bool
) -> None:
    """The digests of cached blocks begin with the salt. Names and salts can be guessed, so workers get a hash of them
    under a key, which all gateways of a service have."""
    salts: list[str] = []
    for cache_key in (b"first", b"first", b"second"):
        begin = (
            start(entry("good", GOOD), cache_key=cache_key)
            if with_tokens
            else start_http("p0", "d0", cache_key=cache_key)
        )
        http = await begin
        assert (await complete(http, cache_salt="s")).status_code == 200
        salts += {request.salt for _, request in http.service.fleet["p0"].requests}
    same, again, other = salts
    assert same == again != other
    assert not {"s", "good", "good/s"} & set(salts)


async def test_callers_neither_see_nor_block_each_other(start: StartHttp) -> None:
    """An id that another caller uses is free, and the live page shows a caller its own requests."""
    http = await start(entry("good", GOOD), entry("other", OTHER), entry("op", "op-token", operator=True))
    for token in (GOOD, OTHER):
        assert (await complete(http, token, request_id=f"done-{token}", max_tokens=2)).status_code == 200
    http.service.fleet["d0"].hangs = {"decode"}

    async def begin(token: str, prompt: list[int]) -> Any:
        client = AsyncClient(target(http), token=token)
        stream = client.generate(prompt, max_tokens=4, request_id="mine")
        await anext(stream)
        return client, stream

    begun = [await begin(GOOD, PROMPT), await begin(OTHER, [7, 8, 9])]
    http.service.fleet["d0"].hangs = set()

    async def live(token: str) -> tuple[list[str], list[str], list[int]]:
        view = (await http.client.get("/live.json", headers={"authorization": f"Bearer {token}"})).json()
        lengths = [each["prompt_tokens"] for each in view["requests"]]
        return [each["id"] for each in view["requests"]], [each["id"] for each in view["finished"]], lengths

    assert await live(GOOD) == (["mine"], [f"done-{GOOD}"], [3])
    assert await live(OTHER) == (["mine"], [f"done-{OTHER}"], [3])
    assert await live("op-token") == (["mine", "mine"], [f"done-{OTHER}", f"done-{GOOD}"], [3, 3])
    async with AsyncClient(target(http), token=GOOD) as client:
        with pytest.raises(InvalidRequest, match=r"'mine' is in use by another request") as refused:
            await client.generate([5], max_tokens=4, request_id="mine").result()
        assert refused.value.kind == "DuplicateRequest"
        # The owner takes over its own request, and nobody else's.
        assert (await client.generate(PROMPT, max_tokens=4, request_id="mine").result()).token_ids == (4, 5, 6, 7)
    assert "mine" in (await live(OTHER))[0]
    for client, stream in begun:
        stream.cancel()
        await client.close()
    await http.service.until(lambda: http.service.is_idle)


async def order_of(http: Http, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """The order in which calls (tokens and options) are served that come, one after the other, while the first runs."""
    http.service.fleet["p0"].delay_s = {"prefill": 1.0}
    router = http.service.gateway.router
    tasks: list[asyncio.Task[httpx2.Response]] = []
    for number, (token, options) in enumerate(calls):
        tasks.append(asyncio.create_task(complete(http, token, request_id=str(number), **options)))
        await http.service.until(lambda: router.queued + router.running == len(tasks))
    http.service.fleet["p0"].delay_s = {}
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    return [request.request_id for _, request in http.service.fleet["p0"].requests]


async def test_bearers_of_tokens_take_turns_and_priorities_go_before(start: StartHttp) -> None:
    """Also for requests that name a user: they are those of one bearer."""
    http = await start(
        entry("good", GOOD, limits={"min_priority": -1}), entry("other", OTHER), router={"prefill_backlog_tokens": 1}
    )
    order = await order_of(
        http,
        *((GOOD, {"user": "a"}), (GOOD, {"user": "b"}), (GOOD, {"user": "c"}), (GOOD, {}), (OTHER, {})),
        (GOOD, {"priority": -1}),
    )
    assert order == ["0", "5", "1", "4", "2", "3"]
    assert http.service.fleet["d0"].requests[1][1].priority == -1
    answer = await complete(http, OTHER, priority=-1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("priority: -1 is below 0, the lowest that the token allows")
    async with AsyncClient(target(http), token=OTHER) as client:
        with pytest.raises(InvalidRequest, match=r"^priority: -2 is below 0"):
            await client.generate(PROMPT, max_tokens=2, priority=-2).result()
        assert (await client.generate(PROMPT, max_tokens=2, priority=3).result()).token_ids
    assert http.service.fleet["d0"].requests[-1][1].priority == 3


async def test_without_tokens_users_take_turns(start_http: StartHttp) -> None:
    http = await start_http("p0", "d0", router={"prefill_backlog_tokens": 1})
    users = ["a", "a", "a", "b", None]  # without one: those of the same host
    assert await order_of(http, *((GOOD, {"user": user}) for user in users)) == ["0", "1", "3", "4", "2"]
