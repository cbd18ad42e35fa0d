from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplate
from gateway.http_api.requests import ChatBody
from gateway.http_api.submissions import tool_calls
from pdserve.core.errors import InvalidRequest
from tests.gateway.http_api.conftest import Http, StartHttp, shared

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
JSON = {"type": "json_object"}


async def prompt_text(http: Http, **body: Any) -> str:
    """The text of the prompt that the workers got."""
    answer = await http.post(PATH, max_tokens=1, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    tokenizer = http.service.gateway._inference.tokenizer
    assert tokenizer is not None
    return "".join(tokenizer.token_text(each) for each in answer.json()["choices"][0]["prompt_token_ids"])


@shared
async def test_messages_become_the_models_prompt(shared_http: Http) -> None:
    assert await prompt_text(shared_http, messages=MESSAGES) == "<s>[system] be brief\n[user] the quick\n[assistant] "
    assert await prompt_text(shared_http, messages=MESSAGES[1:], add_generation_prompt=False) == "<s>[user] the quick\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert await prompt_text(shared_http, messages=parts) == "<s>[user] a\nb\n[assistant] "
    tools = [{"type": "function", "function": {"name": "größe"}}]
    assert 'tools [{"type": "function", "function": {"name": "größe"}}]' in await prompt_text(
        shared_http, messages=MESSAGES, tools=tools, tool_choice="none"
    )


@shared
async def test_an_answer(shared_http: Http) -> None:
    answer = (await shared_http.post(PATH, messages=MESSAGES, max_completion_tokens=4, ignore_eos=True)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    events = await shared_http.events(PATH, messages=MESSAGES, max_completion_tokens=4, ignore_eos=True)
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


@shared
async def test_without_a_limit_the_context_is_filled(shared_http: Http) -> None:
    answer = (await shared_http.post(PATH, messages=MESSAGES, ignore_eos=True)).json()
    assert answer["usage"]["total_tokens"] == 256


async def test_a_model_without_a_template_says_what_to_do(start_http: StartHttp, model_folder: Path) -> None:
    http = await start_http("p0", "d0", folder=model_folder)
    answer = await http.post(PATH, messages=MESSAGES)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "no chat template" in message
    assert "model.chat_template" in message


async def test_a_template_of_the_users_own(start_http: StartHttp, model_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    http = await start_http("p0", "d0", folder=model_folder, model={"chat_template": str(template)})
    assert await prompt_text(http, messages=MESSAGES) == "be briefthe quick"


@shared
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "json_schema"),
        ({"messages": MESSAGES, "response_format": JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": MESSAGES, "response_format": JSON, "ignore_eos": True}, "ignore_eos"),
        ({"messages": MESSAGES, "structured_outputs": {}}, "structured_outputs"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "ä"}}]}, "tools"),
        ({"messages": MESSAGES, "tools": [*TOOLS, *TOOLS]}, "tools"),
        ({"messages": MESSAGES, "tools": TOOLS, "response_format": JSON}, "tools"),
        ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": MESSAGES, "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": "\\ud800"}'}}]}]},
            "messages",
        ),
    ],
)
async def test_bad_bodies_name_the_field(shared_http: Http, body: dict[str, Any], param: str) -> None:
    answer = await shared_http.post(PATH, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@shared
@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("store", [False], True),
        ("service_tier", ["auto", "default"], "flex"),
        ("modalities", [["text"]], ["text", "audio"]),
        ("verbosity", ["medium"], "low"),
        ("reasoning_effort", ["none"], "high"),
        ("prompt_cache_key", ["a"], 5),
        ("safety_identifier", ["a"], 5),
        ("metadata", [{"a": "b"}], {"a": 5}),
    ],
)
async def test_fields_of_clients_that_ask_for_nothing(
    shared_http: Http, field: str, neutral: list[Any], asking: Any
) -> None:
    for value in [*neutral, None]:
        answer = await shared_http.post(PATH, messages=MESSAGES, max_tokens=1, **{field: value})
        assert answer.status_code == 200, answer.text
    error = (await shared_http.post(PATH, messages=MESSAGES, **{field: asking})).json()["error"]
    assert error["param"].partition(".")[0] == field
    assert error["code"] == "InvalidRequest"


def test_models_whose_calls_are_not_known_refuse_tools() -> None:
    body = ChatBody.model_validate({"messages": MESSAGES, "tools": TOOLS})
    for template in (None, ChatTemplate({"default": "[AVAILABLE_TOOLS]{{ tools }}"}, {})):
        with pytest.raises(InvalidRequest, match=r"^tools: .* none of the formats of calls that are known"):
            tool_calls(body, template)


@shared
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score"])
async def test_what_is_no_text_says_that_it_is_not_served(shared_http: Http, path: str) -> None:
    answer = await shared_http.post(path, model="fake", input="x")
    assert answer.status_code == 404
    assert "it is not served: the service generates text" in answer.json()["error"]["message"]
