"""Bodies of HTTP requests to submissions, one per output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.chat_template import NO_TEMPLATE, ChatTemplate
from gateway.http_api.bodies import BodyLimits, JsonCount
from gateway.http_api.requests import (
    MAX_CHAT_NODES,
    MAX_CHAT_VALUES,
    MAX_CHOICES,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    ToolChoice,
)
from gateway.tool_calls import FORMATS, ToolCallParser, calls_grammar, functions_of
from gateway.validation import Submission
from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams, StructuredOutputs

DEFAULT_MAX_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0
MOST_TOKENS = 2**31
"""Asks for all that fit."""
_PLAIN = (
    "temperature", "top_p", "min_p", "seed", "ignore_eos", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "speculation",
)  # fmt: skip
"""Fields of sampling that have the same name and meaning in bodies."""


def completions(body: CompletionBody, request_id: str) -> list[Submission]:
    """The submissions of a completion: of each prompt its ``n`` outputs, one after the other."""
    prompt = body.prompt
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts: Sequence[Any] = prompt if many else [prompt]
    wanted: dict[str, Any] = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    if body.is_prompt_alone:
        wanted["max_tokens"] = 1  # the engine computes a prompt to sample a token, which is not sent
    return _submissions(body, prompts, request_id, wanted, DEFAULT_MAX_TOKENS)


def chat(
    body: ChatBody, template: ChatTemplate | None, request_id: str
) -> tuple[list[Submission], ToolCallParser | None]:
    """The submissions of a chat: its ``n`` outputs. And a parser of tool calls; None if there are to be none."""
    text = render(template, body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
    parser = tool_calls(body, template)
    calls = None
    if parser is not None:
        if _structure(body) is not None:
            raise InvalidRequest("tools: a call would not match the structure of the output; leave out one of them")
        functions = functions_of(body.tools or ())
        if isinstance(body.tool_choice, ToolChoice):
            name = body.tool_choice.function.name
            if name not in functions:
                raise InvalidRequest(f"tool_choice: {name!r} is none of the tools")
            calls = calls_grammar(parser.form, {name: functions[name]}, many=False)
        elif body.tool_choice == "required":
            calls = calls_grammar(parser.form, functions, many=body.parallel_tool_calls is not False)
        parser.forced = calls is not None
    wanted: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    if calls is not None:
        wanted["structured_outputs"] = calls
    return _submissions(body, [text], request_id, wanted, MOST_TOKENS, special_tokens=False), parser


def tool_calls(body: ChatBody, template: ChatTemplate | None) -> ToolCallParser | None:
    """A new parser of an output's tool calls; None if it is to have none. `InvalidRequest` for a model whose calls are
    not known."""
    if not body.tools or body.tool_choice == "none":
        return None
    if template is None or template.tool_format is None:
        known = ", ".join(form.name for form in FORMATS)
        raise InvalidRequest(
            f"tools: the model's chat template has none of the formats of calls that are known ({known}); leave tools "
            "out, set tool_choice to none, or give the model a template that has one (docs/api.md, Tool calls)"
        )
    return ToolCallParser(template.tool_format, frozenset(functions_of(body.tools or ())))


def render(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a chat."""
    if template is None:
        raise InvalidRequest(NO_TEMPLATE)
    arguments = JsonCount(BodyLimits(MAX_CHAT_VALUES, MAX_CHAT_NODES), "messages: the arguments of tool calls have")
    return template.render(
        [_plain(message, arguments) for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
    )


def _plain(message: ChatMessage, arguments: JsonCount) -> dict[str, Any]:
    """The message as templates expect it: content is text, and arguments of tool calls are objects, counted with those
    of other messages."""
    plain = {key: value for key, value in message.model_dump().items() if value is not None or key == "content"}
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequest("messages: tool_calls is no list; give the calls as OpenAI's API does, or leave it out")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments.add_text(function["arguments"])
            try:
                function["arguments"] = json.loads(function["arguments"])
                json.dumps(function["arguments"], ensure_ascii=False).encode()  # half of a surrogate pair is no text
            except ValueError:
                raise InvalidRequest("messages: the arguments of a tool call are not valid JSON") from None
    return plain


def _submissions(
    body: GenerationBody,
    prompts: Sequence[Any],
    request_id: str,
    wanted: Mapping[str, Any],
    default_max_tokens: int,
    special_tokens: bool = True,
) -> list[Submission]:
    """``wanted`` are fields of sampling that come before those of the body."""
    choices = body.n or 1
    count = len(prompts) * choices
    if count > MAX_CHOICES:
        raise InvalidRequest(
            f"n: {len(prompts)} prompts with {choices} outputs are more than {MAX_CHOICES}; ask for less"
        )
    asked: int | None = getattr(body, "max_tokens", None)
    if body.max_completion_tokens is not None:
        if asked not in (None, body.max_completion_tokens):
            raise InvalidRequest(
                f"max_completion_tokens: {body.max_completion_tokens} is not max_tokens ({asked}); leave one out"
            )
        asked = body.max_completion_tokens
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    options = {
        "temperature": DEFAULT_TEMPERATURE,
        "max_tokens": default_max_tokens if asked is None else asked,
        "top_k": max(0, body.top_k or 0),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(dict.fromkeys(body.stop_token_ids or ())),
        "structured_outputs": _structure(body),
    }
    sampling = SamplingParams(**{**options, **given, **wanted})
    submissions = []
    for index in range(count):
        seed = None if sampling.seed is None else (sampling.seed + index % choices) % 2**63
        submissions.append(
            Submission(
                prompt=prompts[index // choices],
                sampling=msgspec.structs.replace(sampling, seed=seed),
                request_id=request_id if count == 1 else f"{request_id}-{index}",
                mode=body.pdserve.mode,
                salt=body.cache_salt or "",
                session_id=body.session_id or "",
                shorten=asked is None,
                special_tokens=special_tokens,
                priority=body.priority,
                user=body.user or "",
            )
        )
    return submissions


def _structure(body: GenerationBody) -> StructuredOutputs | None:
    """What the output has to match, by either of the two fields."""
    form, asked = body.response_format, body.structured_outputs
    if form is None or form.type == "text":
        return None if asked is None else StructuredOutputs.of(asked.model_dump(by_alias=True))
    if asked is not None:
        raise InvalidRequest("structured_outputs: the response_format has a structure already; leave one out")
    if form.json_schema is None:
        return StructuredOutputs.of({"json_object": True})
    return StructuredOutputs.of({"json": form.json_schema.definition})
