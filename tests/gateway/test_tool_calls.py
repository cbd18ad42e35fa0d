"""Tool calls in the text of an output: the same however it is divided, and nothing of the text is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tool_calls import FORMATS, ToolCallParser, format_of

HERMES, LLAMA = FORMATS
ADD = '{"name": "add", "arguments": {"a": 1, "b": "</tool"}}'
CALLS = [("add", '{"a": 1, "b": "</tool"}')]
OUTPUTS = [
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", CALLS),
    (HERMES, f"I add.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>!", "I add.\n\n!", CALLS * 2),
    (HERMES, f"<tool_call>\n{ADD}", "", CALLS),  # the end of the sequence instead of its end
    (HERMES, "a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    (HERMES, "<tool_call>{]</tool_call> so", "<tool_call>{]</tool_call> so", []),
    (HERMES, '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
    (HERMES, '<tool_call>{"name": ["add"]}</tool_call>', '<tool_call>{"name": ["add"]}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', []),  # cut by max_tokens
    (LLAMA, ' {"name": "add", "parameters": {"a": "ä"}}', "", [("add", '{"a": "ä"}')]),
    (LLAMA, '{"name": "add", "parameters": 5}', '{"name": "add", "parameters": 5}', []),
    (LLAMA, 'See: {"name": "add", "parameters": {}}', 'See: {"name": "add", "parameters": {}}', []),
    (LLAMA, " ", " ", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), OUTPUTS)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
@example(cuts=list(range(120)))
@example(cuts=[])
def test_an_output_in_pieces(form, text, content, calls, cuts) -> None:  # type: ignore[no-untyped-def]
    parser = ToolCallParser(form, frozenset({"add"}))
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    found = [parser.feed(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    assert "".join(shown for shown, _ in found) == content
    assert [call for _, each in found for call in each] == calls
    assert parser.num_calls == len(calls)
    assert all(json.loads(arguments) for _, arguments in calls)


def test_families_are_told_by_their_template() -> None:
    qwen = '{%- if tools %}\n... within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>'
    llama = '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name\' }}'
    assert format_of(qwen) is HERMES
    assert format_of(llama) is LLAMA
    assert format_of(qwen + "<tool_call>\n<function=example>") is None, "Qwen3-Coder writes XML"
    assert format_of("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}") is None
    assert format_of("{{ messages }}") is None
