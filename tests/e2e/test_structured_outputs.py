"""Structured outputs match, and are the same in both modes, in a batch, after a lost engine and after a resume: on a
service with static batches of whole prompts and a transport of its own choice, which serves the same tokens as one with
the defaults."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from pdserve import AsyncClient, Client
from pdserve.core.errors import InvalidRequest
from tests.local_cluster import ROOT, LocalCluster, free_port, local_cluster
from tests.random_models import greedy_tokens

PROMPT = "def read_lines(path):\n"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {"max_tokens": 200, "temperature": 1.2, "seed": 3, "structured_outputs": {"json": SCHEMA}}


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, http_port: int) -> Iterator[LocalCluster]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if tools %}{{ tools }} within <tool_call></tool_call>{% endif %}"
    )
    model = {"path": "tiny", "dtype": "float32", "chat_template": str(template)}
    gateway = {"http_port": http_port}
    engine = {
        "block_size": 16,
        "num_blocks": 160,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 3,
        "speculation": "ngram",
    }
    settings = {
        "engine": {**engine, "batching": "static", "chunk_tokens": "off"},
        "transfer": {"transport": "torch_dist", "overlap": "chunk"},
    }
    with local_cluster({"model": model, "gateway": gateway, **settings}) as started:
        yield started


def test_tokens_are_the_same_however_requests_are_scheduled_and_sent(cluster: LocalCluster) -> None:
    prompts = [[(31 * i + 7 * length) % 307 for i in range(length)] for length in (150, 5, 70, 64)]
    expected = [tuple(greedy_tokens(ROOT / "models" / "tiny", prompt, 6)) for prompt in prompts]
    with Client(cluster.target) as client:
        for mode in ("pd", "colocated"):
            streams = [client.generate(p, max_tokens=6, ignore_eos=True, mode=mode, salt=mode) for p in prompts]
            results = [stream.result() for stream in streams]
            assert [result.token_ids for result in results] == expected
            for result in results:
                assert result.kv_bytes == result.kv_bytes_expected
                assert mode == "colocated" or (result.kv_bytes > 0 and result.transport == "torch_dist")
    cluster.wait_idle()


def test_the_text_matches_and_depends_on_neither_mode_nor_batch(cluster: LocalCluster) -> None:
    with Client(cluster.target) as client:
        colocated = client.generate(PROMPT, mode="colocated", **DRAWN).result()
        apart = client.generate(PROMPT, mode="pd", speculation=False, **DRAWN).result()
        guessed = client.generate(PROMPT, mode="pd", speculation=True, **DRAWN).result()
    assert apart.token_ids == colocated.token_ids == guessed.token_ids
    assert apart.finish_reason == "stop"
    assert apart.kv_bytes == apart.kv_bytes_expected > 0
    jsonschema.validate(json.loads(apart.text), SCHEMA)

    async def together() -> None:
        forms = [{"json": SCHEMA}, {"regex": "[0-9]{3}-[a-f]+"}, {"choice": ["yes", 'no "\\"']}, {"json_object": True}]
        async with AsyncClient(cluster.target) as client:
            free = client.generate(PROMPT, seed=3, temperature=1.2, max_tokens=30).result()
            asked = [
                client.generate(PROMPT, mode=mode, **{**DRAWN, "structured_outputs": form}).result()
                for form in forms
                for mode in ("pd", "colocated")
            ]
            unlike, *results = await asyncio.gather(free, *asked)
        assert [each.token_ids for each in results[::2]] == [each.token_ids for each in results[1::2]]
        texts = [each.text for each in results[::2]]
        assert results[0].token_ids == apart.token_ids != unlike.token_ids
        assert re.fullmatch("[0-9]{3}-[a-f]+", texts[1])
        assert texts[2] in ("yes", 'no "\\"')
        assert texts[3].startswith("{"), "it may be cut by max_tokens"

    asyncio.run(together())
    cluster.wait_idle()


def test_a_lost_engine_and_a_resume_change_no_text(cluster: LocalCluster) -> None:
    long = {**DRAWN, "structured_outputs": {"regex": "([a-z]{3}[0-9] ){60}"}}
    with Client(cluster.target) as client:
        whole = client.generate(PROMPT, mode="colocated", **long).result()
        assert cluster.resumed(client, PROMPT, **long).token_ids == whole.token_ids


def test_what_cannot_be_compiled_is_refused(cluster: LocalCluster) -> None:
    """As text that is none, and as a schema beyond the budget."""
    large = {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(1, 12)]}}
    with Client(cluster.target) as client:
        for form, why in (({"regex": "(("}, "the regex cannot be used: .*unclosed group"), (large, "the JSON schema ")):
            for mode in ("pd", "colocated"):
                with pytest.raises(InvalidRequest, match=rf"^structured_outputs: {why}"):
                    client.generate(PROMPT, mode=mode, structured_outputs=form).result()
    cluster.wait_idle()


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    age: int = pydantic.Field(ge=0, le=150)


def test_openais_helpers_parse(cluster: LocalCluster, http_port: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "seed": 1, "max_tokens": 200}
        answer = client.chat.completions.parse(response_format=Person, **asked)
        assert isinstance(answer.choices[0].message.parsed, Person)
        with client.chat.completions.stream(response_format=Person, **asked) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed
        with pytest.raises(openai.BadRequestError, match="structured_outputs: ") as refused:
            client.completions.create(
                model="tiny", prompt=PROMPT, extra_body={"structured_outputs": {"json": {"type": "nothing"}}}
            )
        assert refused.value.param == "structured_outputs"


class Address(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=10)


class Move(pydantic.BaseModel, extra="forbid"):
    """Parameters whose schema refers to a definition of its own."""

    who: str = pydantic.Field(max_length=10)
    to: Address


@pytest.mark.parametrize(
    ("field", "output"),
    [
        ("tool_calls", r"weather \{'city': .*\}\n"),
        ("response_format", r"\{'city': .*, 'celsius': -?\d+\}\n"),
    ],
)
def test_the_documented_examples_run(cluster: LocalCluster, http_port: int, field: str, output: str) -> None:
    document = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if field in block]
    command = [sys.executable, "-c", example.replace("localhost:8000", f"127.0.0.1:{http_port}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(output, done.stdout)


def streamed(chunks: list[Any]) -> tuple[list[Any], str]:
    """The parts of tool calls in a stream, and its content."""
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    return calls, "".join(delta.content or "" for delta in deltas)


def test_required_and_named_tools_are_called(cluster: LocalCluster, http_port: int) -> None:
    schemas = {"move": Move.model_json_schema(), "wait": None}
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Go"}], "tools": tools, "max_tokens": 400}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(
            tool_choice="required", parallel_tool_calls=False, seed=0, **asked
        ).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert [call.function.name in schemas for call in choice.message.tool_calls] == [True]
        several = client.chat.completions.create(tool_choice="required", seed=0, **asked).choices[0].message.tool_calls
        assert several is not None
        assert len(several) > 1, "the tiny model goes on until max_tokens"
        named: Any = {"type": "function", "function": {"name": "move"}}
        choice = client.chat.completions.create(tool_choice=named, seed=1, **asked).choices[0]
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        Move.model_validate_json(call.function.arguments)
        assert (choice.message.content, choice.finish_reason, call.function.name) == (None, "tool_calls", "move")
        chunks = list(client.chat.completions.create(tool_choice=named, seed=1, stream=True, **asked))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        (first, *parts), content = streamed(chunks)
        assert (first.name, content) == ("move", "")
        assert len(parts) > 5, "arguments come with the tokens that make them"
        assert not any(part.name for part in parts)
        assert "".join(part.arguments for part in (first, *parts)) == call.function.arguments
        with pytest.raises(openai.BadRequestError, match="tool_choice: 'other' is none of the tools"):
            client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "other"}}, **asked)
