from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_text import OutputText, StopStrings
from gateway.tokenizer import ByteLevelDetokenizer


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stops)
    shown = [finder.feed(piece) for piece in pieces]
    if finder.hit is None:
        shown.append(finder.flush())
    return shown, finder.hit


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first end of a stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_any_cut_gives_the_same_as_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    shown, hit = run(stops, pieces)
    assert ("".join(shown), hit) == reference(stops, "".join(pieces))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), text=st.text("abc", max_size=20))
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(stops: list[str], text: str) -> None:
    finder = StopStrings(stops)
    shown = "".join(finder.feed(character) for character in text)
    if finder.hit is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[i:]) for stop in stops for i in range(len(shown)))


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "hit"),
    [
        ([], ["ab"], ["ab", ""], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["aa", "aab", "x"], ["", "aa", ""], "aab"),
        (["END"], ["the E", "N"], ["the ", "", "EN"], None),
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["b", "ab"], ["xab"], ["x"], "ab"),
    ],
)
def test_overlaps_and_holding_back(stops: list[str], pieces: list[str], shown: list[str], hit: str | None) -> None:
    assert run(stops, pieces) == (shown, hit)


WORDS = (b"Hello", b" wor", b"ld", b"!", b"", b" END\xc3")
"""The bytes of token i; the last one ends within a character."""


def output_of(*stops: str) -> OutputText:
    return OutputText(ByteLevelDetokenizer(WORDS.__getitem__), stops)


def test_output_text_trims_tokens_with_the_text() -> None:
    output = output_of("world")
    assert [(output.add(token_id), output.stopped) for token_id in (0, 1, 2)] == [
        ("Hello", False), (" ", False), ("", True),
    ]  # fmt: skip
    assert (output.text, output.token_ids) == ("Hello ", [0, 1])
    assert (output.end(), output.text) == ("", "Hello ")


def test_output_text_gives_everything_at_the_end() -> None:
    output = output_of(" ENDING")
    assert [output.add(token_id) for token_id in (0, 4, 5)] == ["Hello", "", ""]
    assert output.end() == " END�"
    assert (output.text, output.token_ids) == ("Hello END�", [0, 4, 5])


def test_output_without_a_tokenizer_has_tokens_and_no_text() -> None:
    output = OutputText(None)
    assert (output.add(7), output.end(), output.text, output.token_ids) == ("", "", "", [7])
