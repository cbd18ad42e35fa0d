"""Chat templates, held against transformers' rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplate, load_chat_template
from pdserve.core.errors import InvalidRequest, ModelError
from tests.gateway.conftest import build_byte_level

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' -%}{{ '<|im_start|>system\\nhi<|im_end|>\\n' }}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LOOPS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }} {% endif %}{% endfor %}{{ flavour | default('plain') }}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  hällo <b> & 'x'  "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "u"}, {"role": "tool", "content": "42"}, {"role": "user", "content": "日本"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer > 3", "parameters": {}}}]


@pytest.mark.parametrize("template", [CHATML, LOOPS], ids=["chatml", "loops"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("ask", [False, True])
def test_it_renders_as_transformers_does(
    tmp_path: Path, template: str, chat: list[dict[str, Any]], tools: Any, ask: bool
) -> None:
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    ours = load_chat_template(build_byte_level(tmp_path, config))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = template
    assert ours is not None
    expected = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=ask, tokenize=False)
    assert ours.render(chat, tools=tools, add_generation_prompt=ask) == expected


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert load_chat_template(None) is None
    assert load_chat_template(tmp_path) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    both = load_chat_template(tmp_path)
    assert both is not None
    assert (both.render([]), both.render([], tools=[{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("a file")
    (tmp_path / "own.jinja").write_text("my own")
    for path, text in ((None, "a file"), (tmp_path / "own.jinja", "my own")):
        template = load_chat_template(tmp_path, path)
        assert template is not None
        assert template.render([]) == text


def test_variables_of_the_request() -> None:
    template = ChatTemplate({"default": LOOPS}, {"bos_token": "<s>"})
    assert template.render([], variables={"flavour": "mint"}) == "<s>mint"


def test_a_template_that_refuses() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('no systems here') }}"}, {})
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template refuses them: no systems here$"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].nothing.here }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_fails_or_leaves_its_sandbox(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template fails with them: "):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_never_ends_is_cut_off() -> None:
    source = "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"^messages: their prompt has more than"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x" * 10_000}])


def test_broken_templates_are_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^chat template: it cannot be compiled"):
        ChatTemplate({"default": "{% if %}"}, {})
    with pytest.raises(ModelError, match=r"^chat template: .*cannot be read"):
        load_chat_template(None, tmp_path / "nothing.jinja")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": ""}]}))
    with pytest.raises(ModelError, match=r"none of \['rag'\] is named default"):
        load_chat_template(tmp_path)
