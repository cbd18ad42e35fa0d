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
    (LLAMA, *[r'{"name": "add", "parameters": {"a": "\ud83d"}}'] * 2, []),  # no text
    (LLAMA, *['{"name": "add", "parameters": {"a": NaN}}'] * 2, []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), OUTPUTS)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
@example(cuts=list(range(120)))
@example(cuts=[])
def test_an_output_in_pieces(form, text, content, calls, cuts) -> None:  # type: ignore[no-untyped-def]
    parser = ToolCallParser(form, frozenset({"add"}))
    found = [parser.feed(piece, last) for piece, last in pieces(text, cuts)]
    assert "".join(shown for shown, _ in found) == content
    assert [call for _, each in found for call in each] == [(number, *call) for number, call in enumerate(calls)]
    assert parser.num_calls == len(calls)
    assert parser.is_complete == bool(calls)
    assert all(json.loads(arguments) for _, arguments in calls)


ARGUMENTS = r'{"a": "}\\\"\"{", "b": [{"name": "add", "parameters": 5}, []]}'
FORCED = [
    (HERMES, f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', [("add", ARGUMENTS)], True),
    (
        HERMES,
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
        [("add", ARGUMENTS), ("wait", "{}")],
        True,
    ),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": "x', [("add", '{"a": "x')], False),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na', [("add", "{}")], True),
    (HERMES, '<tool_call>\n{"name": "ad', [], False),
    (LLAMA, f'{{"name": "add", "parameters": {ARGUMENTS}}}', [("add", ARGUMENTS)], True),
    (LLAMA, '{"name": "add", "parameters": ', [("add", "")], False),
]


@pytest.mark.parametrize(("form", "text", "calls", "complete"), FORCED)
@given(cuts=st.lists(st.integers(0, 250), max_size=12))
@example(cuts=list(range(250)))
@example(cuts=[])
def test_a_forced_output_is_calls_alone_and_gives_them_as_they_come(form, text, calls, complete, cuts) -> None:  # type: ignore[no-untyped-def]
    parser = ToolCallParser(form, frozenset({"add", "wait"}), forced=True)
    found: list[tuple[str, str]] = []
    for piece, last in pieces(text, cuts):
        content, parts = parser.feed(piece, last)
        assert not content
        for number, name, arguments in parts:
            assert bool(name) == (number == len(found)), "the name comes first, and once"
            found[number:] = [(name, arguments) if name else (found[number][0], found[number][1] + arguments)]
    assert found == calls
    assert parser.is_complete == complete


def pieces(text: str, cuts: list[int]) -> list[tuple[str, bool]]:
    """The text, cut into pieces, and whether each is the last."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    ends = list(itertools.pairwise(bounds))
    return [(text[start:end], index == len(ends) - 1) for index, (start, end) in enumerate(ends)]


def test_families_are_told_by_their_template() -> None:
    qwen = '{%- if tools %}\n... within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>'
    llama = '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name\' }}'
    assert format_of(qwen) is HERMES
    assert format_of(llama) is LLAMA
    assert format_of(qwen + "<tool_call>\n<function=example>") is None, "Qwen3-Coder writes XML"
    assert format_of("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}") is None
    assert format_of("{{ messages }}") is None
