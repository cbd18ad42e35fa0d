"""The page at ``/docs``: the OpenAPI document for readers, without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Schema = Mapping[str, Any]

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
