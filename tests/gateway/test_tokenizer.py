from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors

from gateway.tokenizer import IN_THREAD_CHARACTERS, Tokenizer, load_tokenizer
from pdserve.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def build(model_folder: Path, tmp_path: Path) -> Callable[..., Tokenizer]:
    import json

    def make(config: dict[str, Any] | None, *, template: bool = False) -> Tokenizer:
        inner = HFTokenizer.from_file(str(model_folder / "tokenizer.json"))
        if template:
            inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        inner.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return make


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "special": True}])
@pytest.mark.parametrize("template", [True, False])
def test_bos_comes_once_if_asked_for(build: Callable[..., Tokenizer], bos: object, template: bool) -> None:
    ids = build({"add_bos_token": True, "bos_token": bos}, template=template).encode("abc")
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_bos_follows_the_file_unless_configured_otherwise(build: Callable[..., Tokenizer]) -> None:
    assert build(None).encode("abc")[0] != 0
    assert build({"bos_token": "<s>"}).encode("abc")[0] != 0
    assert build(None, template=True).encode("abc")[0] == 0
    assert build({"add_bos_token": False, "bos_token": "<s>"}, template=True).encode("abc")[0] != 0


async def test_long_texts_are_encoded_like_short_ones(tokenizer: Tokenizer) -> None:
    for text in ("short", "long " * IN_THREAD_CHARACTERS):
        assert await tokenizer.encode_async(text) == tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_models_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(None) is None
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{not json", "[1]"])
def test_broken_files_are_named(model_folder: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_the_text_of_one_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("größer 日本語 😀")
    assert all(tokenizer.token_text(i) == tokenizer.decode([i]) for i in ids)
    assert (tokenizer.token_text(0), tokenizer.token_text(10**6)) == ("<s>", "")
