from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from gateway.tokenizer import Detokenizer, Tokenizer, WindowDetokenizer

TEXTS = st.text(st.sampled_from("abc é日本語😀 ▁\n\u200d"), max_size=40)


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_byte_level_pieces_make_exactly_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Arbitrary tokens: special ones, ids outside the vocabulary, and bytes that are not UTF-8."""
    token_ids = data.draw(st.lists(st.integers(0, 420), max_size=40))
    assert "".join(stream(tokenizer.detokenizer(()), token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_byte_level_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer.detokenizer(()), list(tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.fixture(scope="session")
def sentencepiece() -> HFTokenizer:
    """Llama 2's kind: ▁ for spaces, bytes for what the vocabulary lacks, a space in front of the first word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁", "▁ab", "日本", "ab"]
    tokenizer = HFTokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def spell(tokenizer: HFTokenizer, text: str) -> list[int]:
    token_ids: list[int] = []
    for character in text.replace(" ", "▁"):
        token_id = tokenizer.token_to_id(character)
        if token_id is None:
            token_ids += [id_of(tokenizer, f"<0x{byte:02X}>") for byte in character.encode()]
        else:
            token_ids.append(token_id)
    return token_ids


def id_of(tokenizer: HFTokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abc é日😀 "), max_size=30), prompt=st.sampled_from(["", "ab", " a b c"]))
def test_sentencepiece_pieces_continue_the_prompt(sentencepiece: HFTokenizer, text: str, prompt: str) -> None:
    before, token_ids = spell(sentencepiece, prompt), spell(sentencepiece, text)
    pieces = stream(WindowDetokenizer(sentencepiece.decode, before[-4:]), token_ids)
    assert not any("�" in piece for piece in pieces)
    whole, given_before = sentencepiece.decode(before + token_ids), sentencepiece.decode(before)
    assert "".join(pieces) == whole.removeprefix(given_before)


def test_window_shows_broken_bytes_late_but_shows_them(sentencepiece: HFTokenizer) -> None:
    byte = id_of(sentencepiece, "<0xE2>")
    pieces = stream(WindowDetokenizer(sentencepiece.decode), [byte] * 100)
    assert pieces[:3] == ["", "", ""]
    assert "".join(pieces) == "�" * 100


def test_window_flushes_incomplete_characters(sentencepiece: HFTokenizer) -> None:
    token_ids = spell(sentencepiece, "a😀")
    assert stream(WindowDetokenizer(sentencepiece.decode), token_ids[:-1])[:4] == ["a", "", "", ""]
    assert stream(WindowDetokenizer(sentencepiece.decode), token_ids[:-1])[-1] == "���"


@pytest.mark.parametrize("word", ["a", "<0xE2>", "<s>"])
def test_window_costs_the_same_per_token_however_long_the_output(sentencepiece: HFTokenizer, word: str) -> None:
    longest = 0

    def decode(token_ids: object) -> str:
        nonlocal longest
        ids = list(token_ids)  # type: ignore[call-overload]
        longest = max(longest, len(ids))
        return str(sentencepiece.decode(ids))

    stream(WindowDetokenizer(decode), [id_of(sentencepiece, word)] * 2000)
    assert longest <= 2 * WindowDetokenizer.MAX_WINDOW


def test_window_ignores_a_context_that_ends_in_half_a_character(sentencepiece: HFTokenizer) -> None:
    half = spell(sentencepiece, "日")[:-1]
    assert stream(WindowDetokenizer(sentencepiece.decode, half), spell(sentencepiece, "ab")) == ["a", "b", ""]


def test_the_bytes_of_sentencepieces(sentencepiece: HFTokenizer, tmp_path: Path) -> None:
    sentencepiece.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert b"".join(map(tokenizer.token_bytes, spell(sentencepiece, " a😀"))) == " a😀".encode()
