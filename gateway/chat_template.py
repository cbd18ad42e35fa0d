"""Chat templates of Hugging Face folders: messages to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tokenizer import read_json
from gateway.tool_calls import format_of
from pdserve.core.errors import InvalidRequest, ModelError

NO_TEMPLATE = (
    "messages: this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); use "
    "/v1/completions, or give the service a template with model.chat_template"
)
MAX_RENDERED_CHARACTERS = 16 * 2**20


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant wrote, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """``sources`` are Jinja templates by name; ``default`` must be one of them, and ``tool_use`` is used for requests
    with tools. ``special_tokens`` are the variables ``bos_token``, ``eos_token`` and the like. `ModelError` if a
    template cannot be compiled.

    Templates come with model folders, so they run in Jinja's sandbox."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self.tool_format = format_of(sources.get("tool_use", sources["default"]))
        """How the model writes tool calls; None if that is not known."""
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise ModelError(f"chat template: it cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``. ``variables`` are further variables of the template. `InvalidRequest` if the
        template refuses the messages or fails with them."""
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        given: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        given |= {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = "".join(_bounded(template.generate(given)))
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a template raises for messages it does not expect
            raise InvalidRequest(f"messages: the model's chat template fails with them: {error}") from None
        return text


def load_chat_template(folder: Path | None, path: Path | None = None) -> ChatTemplate | None:
    """The template at ``path``, else that of the model's folder: ``chat_template.jinja``, or ``chat_template`` in
    ``tokenizer_config.json`` (one template, or a list of named ones). None if there is none. `ModelError` if it cannot
    be read."""
    config = {} if folder is None else read_json(folder / "tokenizer_config.json")
    own = None if folder is None else folder / "chat_template.jinja"
    chosen = path or (own if own is not None and own.is_file() else None)
    if chosen is not None:
        sources = {"default": _read(chosen)}
    elif isinstance(found := config.get("chat_template"), str):
        sources = {"default": found}
    elif isinstance(found, list):
        sources = {str(each["name"]): str(each["template"]) for each in found if {"name", "template"} <= each.keys()}
    else:
        return None
    if "default" not in sources:
        raise ModelError(
            f"chat template: none of {sorted(sources)} is named default; give one with model.chat_template"
        )
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    return ChatTemplate(sources, special)


def _bounded(pieces: Any) -> Any:
    """The pieces of a rendered text; `InvalidRequest` once they are too long, for templates that repeat."""
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            raise InvalidRequest(
                f"messages: their prompt has more than {MAX_RENDERED_CHARACTERS} characters; shorten it"
            )
        yield piece


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise InvalidRequest(f"messages: the model's chat template refuses them: {message}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template: {path} cannot be read: {error}") from None
