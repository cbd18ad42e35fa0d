"""Tool calls of chat models: how families write them, a grammar that forces them, and their text to calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import StructuredOutputs

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call: an object with the tool's ``name`` and an object ``arguments``, between
    ``begin`` and ``end``. Without these, the call is the whole output. Templates of the family have all of ``marks``
    in their source and none of ``foreign``."""

    name: str
    marks: tuple[str, ...]
    foreign: tuple[str, ...]
    arguments: str
    begin: str = ""
    end: str = ""


FORMATS = (
    ToolFormat(
        "hermes", ("<tool_call>", "tools"), ("<function=", "<arg_key>"), "arguments", "<tool_call>", "</tool_call>"
    ),
    ToolFormat("llama3", ('{"name": function name, "parameters":',), ("<tool_call>",), "parameters"),
)
"""hermes: Hermes 2 Pro and 3, Qwen2.5 and Qwen3. llama3: Llama 3.1 to 3.3."""


def format_of(template: str) -> ToolFormat | None:
    """The format that the source of a chat template asks the model for; None if it is none of `FORMATS`."""
    for each in FORMATS:
        if all(mark in template for mark in each.marks) and not any(mark in template for mark in each.foreign):
            return each
    return None


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schemas of the tools' arguments by name. `InvalidRequest` for anything but functions."""
    functions: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        function = function if tool.get("type") == "function" and isinstance(function, Mapping) else {}
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                'tools: each must be {"type": "function", "function": {"name": …}}, with a name of 1 to 64 letters, '
                "digits or any of _ . -"
            )
        parameters = function.get("parameters") or {"additionalProperties": False}
        if name in functions or not isinstance(parameters, Mapping):
            raise InvalidRequest(f"tools: {name} is there twice, or its parameters are not a JSON schema")
        functions[name] = parameters
    return functions


def calls_grammar(form: ToolFormat, functions: Mapping[str, Mapping[str, Any]], many: bool) -> StructuredOutputs:
    """Outputs that call one of ``functions``, or, with ``many``, one or more times if the format can. White space is
    that of `json.dumps`, as in the prompts of these families."""
    lines = ["start: call" + (' ("\\n" call)*' if many and form.begin else "")]
    lines.append("call: " + (f'"{form.begin}\\n" one "\\n{form.end}"' if form.begin else "one"))
    lines.append("one: " + " | ".join(f"tool{index}" for index in range(len(functions))))
    for index, (name, parameters) in enumerate(functions.items()):
        # Definitions are referred to from the root of a schema.
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        own = {key: value for key, value in parameters.items() if key not in shared}
        schema = {
            **shared,
            "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            "type": "object",
            "properties": {"name": {"const": name}, form.arguments: {"type": "object", **own}},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        lines.append(f"tool{index}: %json {json.dumps(schema)}")
    return StructuredOutputs("grammar", "\n".join(lines))


ToolCall = tuple[int, str, str]
"""What an output adds to a call: the call's number in the output, its name (empty: it has been given), and a part of
its arguments as JSON."""


@dataclass(slots=True)
class ToolCallParser:
    """Separates calls of ``names`` from the other text of one output, which comes in pieces. What does not read as such
    a call stays text. Of a ``forced`` output, which matches `calls_grammar`, calls are given while they come, and there
    is no text."""

    form: ToolFormat
    names: frozenset[str]
    forced: bool = False
    num_calls: int = 0
    _held: str = ""
    _inside: bool = False  # after ``begin``; of a forced call, in its arguments
    _is_text: bool = False  # the output, which could have been a call as a whole
    _depth: int = 0  # of objects and lists in the arguments of a forced call
    _in_string: bool = False
    _escapes: bool = False  # the last character is a backslash

    @property
    def is_complete(self) -> bool:
        """Whether there are calls, and the last one was not cut off."""
        return self.num_calls > 0 and not (self.forced and self._inside)

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """The text that is no call, and the calls. ``last``: nothing follows."""
        if self.forced:
            return "", self._forced(text)
        content, calls = self._whole(text, last) if not self.form.begin else self._marked(text, last)
        numbered = [(number, *call) for number, call in enumerate(calls, self.num_calls)]
        self.num_calls += len(calls)
        return content, numbered

    def _forced(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        self._held += text
        name = ""
        while True:
            if not self._inside:
                head = re.search(f'{{"name": "([^"]+)", "{self.form.arguments}": ', self._held)
                if head is None:
                    return calls
                name, self._inside, self._held = head[1], True, self._held[head.end() :]
                self.num_calls += 1
            arguments = self._take_arguments()
            if name or arguments:
                calls.append((self.num_calls - 1, name, arguments))
            if self._inside:
                return calls

    def _take_arguments(self) -> str:
        """What is held of the arguments of a forced call."""
        end = len(self._held)
        for at, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escapes or character != '"'
                self._escapes = character == "\\" and not self._escapes
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._inside, end = False, at + 1
                    break
        arguments, self._held = self._held[:end], self._held[end:]
        return arguments

    def _whole(self, text: str, last: bool) -> tuple[str, list[tuple[str, str]]]:
        """Text that begins like an object is held back to the end."""
        if self._is_text:
            return text, []
        self._held += text
        self._is_text = self._held.strip()[:1] not in ("", "{")
        if not (self._is_text or last):
            return "", []
        call = None if self._is_text else self._call(self._held)
        return ("", [call]) if call else (self._held, [])

    def _marked(self, text: str, last: bool) -> tuple[str, list[tuple[str, str]]]:
        begin, end = self.form.begin, self.form.end
        content, calls = "", []
        self._held += text
        while True:
            mark = end if self._inside else begin
            before, found, after = self._held.partition(mark)
            if self._inside:
                call = self._call(before) if found or last else None
                if call:
                    calls.append(call)
                elif found or last:
                    content += begin + before + found
                else:
                    break
            elif found:
                content += before
            else:
                keep = 0 if last else next(n for n in range(len(begin) - 1, -1, -1) if before.endswith(begin[:n]))
                content += before[: len(before) - keep]
                after = before[len(before) - keep :]
            self._held = after
            if not found:
                break
            self._inside = not self._inside
        return content, calls

    def _call(self, text: str) -> tuple[str, str] | None:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name, arguments = (call.get("name"), call.get(self.form.arguments, {})) if isinstance(call, dict) else ("", "")
        if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
            return None
        try:
            told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            told.encode()
        except ValueError:  # it has no number, or half of a surrogate pair
            return None
        return name, told
