from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as HFTokenizer

from gateway.tokenizer import IN_THREAD_CHARACTERS, NUM_THREADS, PIECE_CHARACTERS, Tokenizer, load_tokenizer
from pdserve.core.errors import InvalidRequest, ModelError


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


async def test_a_client_with_many_long_texts_does_not_keep_others_from_the_threads(
    build: Callable[..., Tokenizer],
) -> None:
    tokenizer = build(None)
    order: list[str] = []
    may_end = threading.Event()
    encode = tokenizer.encode

    def slow(text: str, *args: Any, **options: Any) -> tuple[int, ...]:
        order.append(text[:4])
        may_end.wait(60)
        return encode(text, *args, **options)

    tokenizer.encode = slow  # type: ignore[method-assign]
    long = "x" * IN_THREAD_CHARACTERS
    many = [asyncio.create_task(tokenizer.encode_async(f"many{long}", client="many")) for _ in range(20)]
    await asyncio.sleep(0)
    one = asyncio.create_task(tokenizer.encode_async(f"one {long}", client="one"))
    await asyncio.sleep(0)
    many[3].cancel()
    may_end.set()
    await one
    assert order.index("one ") <= NUM_THREADS, "it comes after the texts that the threads had"
    await asyncio.gather(*many, return_exceptions=True)
    assert (order.count("many"), order.count("one ")) == (19, 1)
    del many[:]  # the error of the cancelled one refers to its place in line
    await asyncio.sleep(0)
    gc.collect()
    assert not tokenizer._threads._places, "nothing is kept of clients without texts"


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


CONTEXT = 131_072


@pytest.mark.parametrize("unit", ["7", "def f(x):\n    return x[0]\n", "日本語", "word "])
def test_texts_that_are_far_too_long_are_refused_by_their_beginning(tokenizer: Tokenizer, unit: str) -> None:
    """To encode all of 16 MiB takes 12 to 22 s of CPU time."""
    text = unit * (16 * 2**20 // len(unit.encode()))
    message = r"^prompt: its first (\d+) characters have more tokens than the context of"
    with pytest.raises(InvalidRequest, match=message) as refused:
        tokenizer.encode(text, CONTEXT)
    (read,) = re.findall(r"its first (\d+)", str(refused.value))
    assert int(read) < 2**20


def test_texts_of_long_tokens_are_encoded_as_ever(model_folder: Path, tmp_path: Path) -> None:
    """Also where a piece, in which tokens are counted, ends within a token."""
    inner = HFTokenizer.from_file(str(model_folder / "tokenizer.json"))
    inner.add_tokens([AddedToken("q" * 100, special=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert PIECE_CHARACTERS % 100
    text = "q" * 100 * 10_000
    ids = tokenizer.encode(text)
    assert len(ids) == 10_000
    assert tokenizer.encode(text, 10_000) == ids
    with pytest.raises(InvalidRequest, match=r"^prompt: 10000 tokens exceed the context of 9999"):
        tokenizer.encode(text, 9_999)


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


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    text = "größer 日本語 😀"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert tokenizer.token_bytes(0) == b"<s>"


def test_the_text_of_one_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("größer 日本語 😀")
    assert all(tokenizer.token_text(i) == tokenizer.decode([i]) for i in ids)
    assert (tokenizer.token_text(0), tokenizer.token_text(10**6)) == ("<s>", "")
