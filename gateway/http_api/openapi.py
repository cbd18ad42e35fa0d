"""The OpenAPI document: what routes say of bodies that they read themselves, and of their answers. And its page at
``/docs``, without scripts.

Answers are described by the fields that every one of them has; further ones are allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http_api.access import OPEN_PATHS
from gateway.http_api.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pdserve.core.sampling import FinishReason

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_COMPONENTS = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_NUMBERS: Schema = {"type": "array", "items": _NUMBER}
_OBJECT: Schema = {"type": "object"}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _ref(name: str) -> Schema:
    return {"$ref": f"{_COMPONENTS}{name}"}


def _answer(kind: str, choice: Mapping[str, Schema], usage: Mapping[str, Schema], *, whole: bool) -> Schema:
    """An answer, or a chunk of one. Only the last chunks of a stream have a usage and an account."""
    end = {"finish_reason": _or_null({"enum": [*map(str, FinishReason), "tool_calls"]})}
    token_ids = {"token_ids": _NUMBERS, "prompt_token_ids": _NUMBERS}
    stop_reason = {"stop_reason": _or_null(_TEXT)}
    required, optional = ({**end, **stop_reason}, token_ids) if whole else (end, {**stop_reason, **token_ids})
    choices = _list(_object({"index": _NUMBER, **choice, **required}, optional))
    account = {"pdserve": {"anyOf": [_OBJECT, _list(_OBJECT)], "description": "with pdserve.breakdown"}}
    head = {"id": _TEXT, "object": {"const": kind}, "created": _NUMBER, "model": _TEXT, "choices": choices}
    return _object({**head, **usage}, account) if whole else _object(head, {**usage, **account})


def _answers() -> dict[str, Schema]:
    usage = {"usage": _ref("Usage")}
    text = {"text": _TEXT, "logprobs": _or_null(_OBJECT)}
    begun = {"id": _TEXT, "type": {"const": "function"}}
    call = {**begun, "function": _object({"name": _TEXT, "arguments": _TEXT})}
    part = {"index": _NUMBER, "function": _object({"arguments": _TEXT}, {"name": _TEXT})}
    message = _object(
        {"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": {"type": "null"}},
        {"tool_calls": _list(_object(call))},
    )
    calls = {"tool_calls": _list(_object(part, begun))}
    delta = _object({"content": _TEXT}, {"role": {"const": "assistant"}, **calls})
    model = {"id": _TEXT, "object": {"const": "model"}, "created": _NUMBER, "owned_by": _TEXT}
    error: dict[str, Schema] = {
        "message": {"type": "string", "description": "begins with the field that is wrong"},
        "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
        "param": {**_or_null(_TEXT), "description": "the field that is wrong"},
        "code": {"type": "string", "description": "the error's kind; see docs/api.md"},
    }
    return {
        "Completion": _answer("text_completion", text, usage, whole=True),
        "CompletionChunk": _answer("text_completion", text, usage, whole=False),
        "Chat": _answer("chat.completion", {"message": message, "logprobs": _or_null(_OBJECT)}, usage, whole=True),
        "ChatChunk": _answer(
            "chat.completion.chunk", {"delta": delta, "logprobs": _or_null(_OBJECT)}, usage, whole=False
        ),
        "Usage": _object(
            {
                "prompt_tokens": _NUMBER,
                "completion_tokens": _NUMBER,
                "total_tokens": _NUMBER,
                "prompt_tokens_details": _or_null(_object({"cached_tokens": _NUMBER})),
            },
            {
                "completion_tokens_details": _object(
                    {"accepted_prediction_tokens": _NUMBER, "rejected_prediction_tokens": _NUMBER}
                )
            },
        ),
        "Model": _object({**model, "max_model_len": _or_null(_NUMBER)}),
        "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _object(
            {"count": _NUMBER, "max_model_len": _NUMBER, "tokens": _NUMBERS}, {"token_strs": _list(_TEXT)}
        ),
        "Text": _object({"prompt": _TEXT}),
        "Live": _OBJECT,
        "Version": _object({"version": _TEXT}),
        "Error": _object({"error": _object(error)}),
    }


_ERRORS = {
    400: "a field is wrong, or the request can never fit",
    401: "no token, or one that is unknown or has expired",
    403: "the header Host is not a name of the service",
    404: "another model is served",
    408: "the body was not complete within the deadline",
    409: "the request id is in use",
    413: "the body is too large",
    415: "the body is not said to be JSON",
    429: "there is no room now",
    503: "the service is not ready, or workers were lost for good",
    504: "the deadline passed",
}
_RETRIED_LATER = (429, 503)
_RETRY_AFTER = {
    "retry-after": {"description": "seconds until there is room, if known", "schema": {"type": "integer", "minimum": 1}}
}
_REQUEST_ID: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"}
_ASKED_ID: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._:-]{0,128}$"}


def answers(name: str, *errors: int, chunk: str = "") -> Responses:
    """The responses of a route that answers with a component, or fails with one of these statuses. ``chunk``: the
    component that an event of its stream has."""
    content = {"application/json": {"schema": _ref(name)}}
    if chunk:
        data = {"type": "string", "description": f"a {chunk} or an Error as JSON; of the last event [DONE]"}
        content["text/event-stream"] = {"schema": {**_object({"data": data}), "description": "each event"}}
    return {200: {"description": "the answer", "content": content}, **failures(*errors)}


def failures(*statuses: int) -> Responses:
    """The responses of a route that fails with one of these."""
    return {
        status: {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
            **({"headers": _RETRY_AFTER} if status in _RETRIED_LATER else {}),
        }
        for status in statuses
    }


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """The request body of a route that reads it itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body.__name__)}}}}


def generates(body: type[BaseModel], answer: str) -> dict[str, Any]:
    """Options of a route that generates text."""
    responses = answers(answer, *_ERRORS, chunk=f"{answer}Chunk")
    responses[200]["headers"] = {"x-request-id": {"description": "the request's id", "schema": _REQUEST_ID}}
    request_id = {"name": "x-request-id", "in": "header", "description": "the request's id", "schema": _ASKED_ID}
    traceparent = {
        "name": "traceparent",
        "in": "header",
        "description": "W3C trace context; the service's spans become part of the trace",
        "schema": _TEXT,
    }
    return {"responses": responses, "openapi_extra": {**takes(body), "parameters": [request_id, traceparent]}}


def describe(app: FastAPI) -> None:
    """Describe the routes of ``app``, which have `takes`, `answers` and `generates`, in its document."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if "Error" not in schemas:
            _, bodies = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template=f"{_COMPONENTS}{{model}}"
            )
            schemas |= bodies["$defs"] | _answers()
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's own errors, which no route has
                    refusals = failures(403) if path in OPEN_PATHS else failures(401, 403)
                    operation["responses"] |= {str(status): answer for status, answer in refusals.items()}
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


_STYLE = """body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; margin: 0 auto; max-width: 60rem; }
body { padding: 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .25rem; } p { margin: .25rem 0; }
h2 { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid #e4e7eb; }
td { overflow-wrap: anywhere; } th { color: #616e7c; font-size: .85rem; }"""


def manual(document: Mapping[str, Any]) -> str:
    """HTML with every route, its parameters, body and answers, and every schema."""
    info, schemas = document["info"], document["components"]["schemas"]
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])}: HTTP API</title><style>{_STYLE}</style>",
            f"<h1>{escape(info['title'])}: HTTP API</h1>{_paragraph(info['description'])}",
            *(
                _route(method, path, route)
                for path, item in document["paths"].items()
                for method, route in item.items()
            ),
            *(_component(name, schema) for name, schema in schemas.items()),
            "</html>\n",
        )
    )


def _route(method: str, path: str, route: Mapping[str, Any]) -> str:
    parameters = [
        (f"{each['name']} ({each['in']})", _type(each["schema"]), escape(each.get("description", "")))
        for each in route.get("parameters", ())
    ]
    bodies = [("body", _types(route["requestBody"]), "")] if "requestBody" in route else []
    answers = [(status, _types(answer), escape(answer["description"])) for status, answer in route["responses"].items()]
    return (
        f"<h2>{method.upper()} {escape(path)}</h2>{_paragraph(route.get('description', ''))}"
        f"{_table('takes', [*parameters, *bodies])}{_table('status', answers)}"
    )


def _component(name: str, schema: Schema) -> str:
    fields = [
        (field, _type(each), escape("; ".join(_remarks(field, each, schema))))
        for field, each in schema.get("properties", {}).items()
    ]
    values = "" if fields else f"<p>{_type(schema)}</p>"
    description = _paragraph(schema.get("description", ""))
    return f'<h2 id="{escape(name)}">{escape(name)}</h2>{description}{values}{_table("field", fields)}'


def _remarks(name: str, field: Schema, schema: Schema) -> Iterator[str]:
    if name in schema.get("required", ()):
        yield "required"
    if "description" in field:
        yield field["description"]
    if field.get("default") is not None:
        yield f"default {json.dumps(field['default'])}"


def _types(described: Mapping[str, Any]) -> str:
    """The schemas of a body or an answer, one for each media type."""
    content = described.get("content", {}).items()
    return "<br>".join(f"{escape(media)}: {_type(each['schema'])}" for media, each in content if "schema" in each)


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if kinds := schema.get("anyOf"):
        return " or ".join(map(_type, kinds))
    if "const" in schema or "enum" in schema:
        return escape(", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(schema.get("type", "anything"))


def _paragraph(text: str) -> str:
    return f"<p>{escape(text.replace('`', ''))}</p>" if text else ""


def _table(first: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A table whose first column is plain text and whose others are HTML."""
    if not rows:
        return ""
    cells = "".join(f"<tr><td>{escape(name)}<td>{kind}<td>{text}" for name, kind, text in rows)
    return f"<table><tr><th>{first}<th>type<th>meaning{cells}</table>"
