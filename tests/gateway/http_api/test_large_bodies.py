"""What large bodies may hold, and the memory they take. With a context of 131,072 tokens and tokens of up to 128 bytes,
for which a body may have 33 MB."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from gateway.http_api.bodies import FREE_BYTES, MAX_DEPTH, MIN_ROOM_BYTES, BodyLimits, JsonCount
from gateway.http_api.requests import MAX_CHAT_NODES, MAX_CHOICES, MAX_MESSAGES
from gateway.validation import MIN_MESSAGE_BYTES
from pdserve.core.errors import InvalidRequest
from tests.gateway.conftest import PATIENT
from tests.gateway.fuzzing import ANSWER_S, check_alive
from tests.gateway.http_api.conftest import Http, StartHttp, shared
from tests.gateway.http_api.test_connections import CHUNKED, JSON_TYPE

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
CONTEXT = 131_072
LONGEST_TOKEN = "q" * 128
MIB = 2**20
TOO_MUCH = re.compile(r"(body: it has|messages: the arguments of tool calls have) (more than|lists and objects nested)")

# --- counting --------------------------------------------------------------------------------------------------------

texts = st.text(alphabet='[]{},:"\\/ né😀\n', max_size=6)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def sizes(value: object) -> tuple[int, int, int]:
    """How many values a value holds, how many lists, objects and fields, and how deep they are nested. An empty list or
    object counts as two values."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [sizes(each) for each in inner]
    fields = len(value) if isinstance(value, dict) else 0
    values = max(1, len(inner)) + sum(each[0] for each in found)
    return values, 1 + fields + sum(each[1] for each in found), 1 + max((each[2] for each in found), default=0)


def counted(data: bytes, cuts: list[int], values: int, nodes: int) -> None:
    """Count ``data`` in parts."""
    count = JsonCount(BodyLimits(values, nodes), "body: it has")
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(bounds):
        count.add(data[start:end])


@given(jsons, st.booleans(), st.lists(st.integers(min_value=0), max_size=8))
def test_values_are_counted_wherever_a_body_is_cut(value: object, ascii_only: bool, cuts: list[int]) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    values, nodes, depth = sizes(value)
    assert depth <= MAX_DEPTH
    counted(data, cuts, values, nodes)
    for fewer in ((values - 1, nodes), (values, nodes - 1)) if nodes else ():
        with pytest.raises(InvalidRequest, match=r"^body: it has more than"):
            counted(data, cuts, *fewer)


@given(st.binary(max_size=80), st.lists(st.integers(min_value=0), max_size=8))
def test_what_is_no_json_is_counted_or_refused(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(InvalidRequest):
        counted(data, cuts, 9, 9)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_bounded(opening: bytes) -> None:
    counted(opening * MAX_DEPTH, [], 10**6, 10**6)
    counted(b"[" + b"[],[[]]," * 1000, [], 10**6, 10**6)
    counted(b'"' + opening * 1000, [], 10**6, 10**6)
    for cuts in ([], [100]):
        with pytest.raises(InvalidRequest, match=f"^body: it has lists and objects nested more than {MAX_DEPTH} deep"):
            counted(opening * (MAX_DEPTH + 1), cuts, 10**6, 10**6)


# --- what they cost --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one long token."""
    folder = tmp_path_factory.mktemp("long")
    tokenizer = HFTokenizer.from_file(str(chat_folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(LONGEST_TOKEN, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((chat_folder / "tokenizer_config.json").read_text())
    config["chat_template"] += (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
async def http_128k(start_http: StartHttp, long_folder: Path) -> Http:
    """A service of one pair with a context of `CONTEXT`."""
    http = await start_http(folder=long_folder, engine={"max_model_len": CONTEXT}, router=PATIENT)
    for worker_id in ("p0", "d0"):
        http.service.make(worker_id, max_model_len=CONTEXT, num_blocks=2 * CONTEXT)
    await http.service.bring_up("p0", "d0")
    assert http.service.gateway._max_message_bytes > 33e6
    return http


def repeated(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """``unit`` as often as it fits, as the items of a list or object."""
    count = max(1, (size - len(before) - len(after)) // (len(unit) + 1))
    return before + b",".join([unit] * count) + after


END = b',"max_tokens":1000000}'
"""No request may have so many, so every one of them is refused when it has been read."""
MESSAGE = b'{"messages":[{"role":"user","content":"x",'
ASKED = b'{"messages":[{"role":"user","content":"x"}],'
CALLS = MESSAGE + b'"tool_calls":[{"function":{"arguments":"'
PLACES: dict[str, tuple[str, bytes, bytes]] = {
    "prompt": (COMPLETIONS, b'{"prompt":[', b"]" + END),
    "unknown field": (COMPLETIONS, b'{"prompt":"x","a":[', b"]" + END),
    "message": (CHAT, MESSAGE + b'"a":[', b"]}]" + END),
    "tools": (CHAT, ASKED + b'"tools":[{"a":[', b"]}]" + END),
    "arguments": (CHAT, CALLS + b"[", b']"}}]}]' + END),
}


def blocking_post(http: Http, path: str, data: bytes) -> tuple[int, str]:
    """The status and the text of an answer."""
    connection = HTTPConnection("127.0.0.1", http.service.gateway.http_port, timeout=10 * ANSWER_S)
    try:
        connection.request("POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def peak_bytes() -> int:
    """The most memory that this process has had since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kib) * 1024


def forget_peak() -> int:
    """Begin anew; returns the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


MEMORY_BYTES = 96 * MIB
"""Bound for a body of 4 MiB: at least five times what was measured."""


async def test_no_body_takes_much_memory(http_128k: Http) -> None:
    for place, (path, before, after) in PLACES.items():
        data = repeated(before, b"[0]", after, 4 * MIB)
        before_bytes = forget_peak()
        status, text = await asyncio.to_thread(blocking_post, http_128k, path, data)
        assert (status, bool(TOO_MUCH.search(text))) == (400, True), (place, text[:200])
        assert peak_bytes() - before_bytes < MEMORY_BYTES, place
        await check_alive(http_128k.service)


# --- what is refused, and what is not --------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


@shared
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt: list should have at most 128 items"),
        (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt: list should have at most 128 items"),
        (COMPLETIONS, {"prompt": [[1]] * 2000}, "body: it has more than 1024 lists, objects and fields"),
        (COMPLETIONS, {"prompt": "x", "a": nested(70)}, "body: it has lists and objects nested more than 64 deep"),
        (COMPLETIONS, {"prompt": [7] * 40_000}, "body: it has more than 34816 values"),
        (DETOKENIZE, {"tokens": [7] * 2000}, "body: it has more than 1536 values"),
        (DETOKENIZE, {"tokens": [7] * 300}, "tokens: 300 tokens exceed the context of 256"),
        (CHAT, {"messages": [{"role": "user", "a": [0] * 140_000}]}, "body: it has more than 131072 values"),
        (CHAT, {"messages": [{"role": "user", "a": [{}] * 70_000}]}, "body: it has more than 65536 lists, objects"),
        (TOKENIZE, {"messages": [{"role": "user", "a": nested(70)}]}, "body: it has lists and objects nested more"),
    ],
)
async def test_what_a_body_may_hold(shared_http: Http, path: str, body: dict[str, Any], message: str) -> None:
    answer = await shared_http.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(message)


@shared
@pytest.mark.parametrize("arguments", ["[" * 100_000, "[[],[]]" * 70_000, json.dumps([[]] * 70_000)])
async def test_what_arguments_of_tool_calls_may_hold(shared_http: Http, arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    answer = await shared_http.post(CHAT, messages=[{"role": "assistant", "tool_calls": calls}])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("messages: the arguments of tool calls have ")


@shared
async def test_arguments_are_counted_over_all_calls(shared_http: Http) -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps([[]] * 1000)}}]
    message = {"role": "assistant", "tool_calls": calls}
    answers = [await shared_http.post(TOKENIZE, messages=[message] * count) for count in (60, 70)]
    assert "arguments of tool calls have more than 65536" in answers[1].text
    assert "arguments" not in answers[0].text


async def test_the_longest_prompts_are_served(http_128k: Http) -> None:
    prompt = [1 + number % 900 for number in range(CONTEXT - 2)]
    assert (await http_128k.complete(prompt=prompt, max_tokens=2))["usage"]["prompt_tokens"] == CONTEXT - 2
    text = LONGEST_TOKEN * 10_000
    assert (await http_128k.complete(prompt=text, max_tokens=2))["usage"]["prompt_tokens"] == 10_000
    many = await http_128k.complete(prompt=[prompt[:4000]] * MAX_CHOICES, max_tokens=1)
    assert many["usage"]["prompt_tokens"] == 4000 * MAX_CHOICES


async def test_the_longest_chats_are_read(http_128k: Http) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(4)}}] * 64
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}] * 1500 + [
        {"role": "user", "content": [{"type": "text", "text": "x"}]}
    ] * (MAX_MESSAGES - 1500)
    assert json.dumps([messages, tools]).count(":") < MAX_CHAT_NODES
    answer = await http_128k.post(TOKENIZE, messages=messages, tools=tools)
    assert answer.status_code == 200, answer.text[:300]


# --- the sum of all --------------------------------------------------------------------------------------------------


def began(http: Http, client: str, data: bytes) -> socket.socket:
    """A connection from the address ``client`` that has sent the beginning of a request."""
    target = ("127.0.0.1", http.service.gateway.http_port)
    connection = socket.create_connection(target, ANSWER_S, source_address=(client, 0))
    connection.sendall(data)
    return connection


def announced(size: int) -> bytes:
    """The head of a request with a body of so many bytes."""
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "host: localhost", JSON_TYPE, f"content-length: {size}", "", "")
    return "\r\n".join(lines).encode()


def refused(http: Http, client: str, data: bytes) -> tuple[int, str, bool]:
    """How the beginning of a request is refused: the status, the message, and whether it says when to come back."""
    with began(http, client, data) as connection:
        answer = b""
        while not answer.endswith(b"}}"):
            part = connection.recv(2**16)
            assert part, answer
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"], b"\r\nretry-after: 1" in head


async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent(http: Http) -> None:
    status, message, _ = await asyncio.to_thread(refused, http, "127.0.0.1", announced(MIN_MESSAGE_BYTES + 1))
    assert (status, message) == (413, "body: it is larger than 1048576 bytes; shorten it")
    await check_alive(http.service)


async def test_the_sum_of_bodies_is_bounded_and_one_clients_at_half_of_it(http: Http) -> None:
    of_one = MIN_ROOM_BYTES // 2 // (MIN_MESSAGE_BYTES - FREE_BYTES)
    large, small = announced(MIN_MESSAGE_BYTES), announced(FREE_BYTES)
    chunks = CHUNKED + 30 * (b"%x\r\n%s\r\n" % (2**15, b" " * 2**15))
    inference = http.service.gateway._inference
    with contextlib.ExitStack() as stack:
        of_all = "all calls would have more than 268435456 bytes"
        of_all = "all calls would have more than 268435456 bytes"
        for others, client, data, said in (
            (["127.0.0.2"] * of_one, "127.0.0.2", large, "one client would have more than 134217728 bytes"),
            (["127.0.0.3"] * of_one + ["127.0.0.4"], "127.0.0.4", large, of_all),
            ([], "127.0.0.4", chunks, of_all),  # they count when they come
        ):
            begun = inference.in_progress + len(others)
            for other in others:
                stack.enter_context(began(http, other, large))
            await http.service.until(lambda: inference.in_progress == begun)  # noqa: B023
            status, message, comes_back = await asyncio.to_thread(refused, http, client, data)
            assert (status, comes_back) == (429, True)
            assert message.startswith(f"body: with it the bodies of {said}")
        stack.enter_context(began(http, "127.0.0.4", small))
        await http.service.until(lambda: inference.in_progress == 2 * of_one + 2)
        assert (await http.complete(prompt=[5, 6], max_tokens=2))["usage"]["completion_tokens"] == 2
    await http.service.until(lambda: inference.in_progress == 0)
    answer = await http.post(COMPLETIONS, prompt="x" * (MIN_MESSAGE_BYTES - 100))
    assert answer.status_code == 400, "there is room for it"
    await check_alive(http.service)
