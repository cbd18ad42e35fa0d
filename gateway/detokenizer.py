"""Tokens to text, one at a time. A character whose bytes are spread over tokens comes when it is complete, never as
U+FFFD before; what is still incomplete when the output ends is given by `flush`, as a whole decode would show it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "�"


class Detokenizer(Protocol):
    """The text of one output as it grows."""

    def add(self, token_id: int) -> str:
        """What this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """The end has come: what was held back."""
        ...


def byte_of_character() -> dict[str, int]:
    """How byte-level BPE writes bytes as printable characters (GPT-2's table), read backwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDetokenizer:
    """For byte-level BPE: every token is a run of bytes, so an incremental UTF-8 decoder is all it takes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters this token completes."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD if a character is incomplete."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For everything else (sentencepiece and its kind, where a token's text depends on what precedes it): decodes a
    short window twice, with and without the new tokens, and gives the difference."""

    MAX_HELD = 4  # no character has more bytes: tokens beyond that hold none that could still become complete
    MAX_WINDOW = 32

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """``context`` are the tokens before the output (the prompt's last few): with them, a first token that begins
        a word keeps its space."""
        self._decode = decode
        self._window = list(context)
        self._given = decode(self._window)  # the window's text that is out
        if self._given.endswith(REPLACEMENT):
            self._window, self._given = [], ""
        self._num_given = len(self._window)  # tokens of the window whose text is out

    def add(self, token_id: int) -> str:
        """The text this token completes."""
        self._window.append(token_id)
        held = len(self._window) - self._num_given
        text = self._decode(self._window)
        incomplete = text.endswith(REPLACEMENT) and held < self.MAX_WINDOW
        if incomplete and held < self.MAX_HELD:
            return ""
        end = len(text) - (self._may_change(text) if incomplete else 0)
        new = text[len(self._given) : end]
        if incomplete:
            self._given += new
        elif new:  # the new tokens are the context of the next
            del self._window[: self._num_given]
            self._given, self._num_given = self._decode(self._window), len(self._window)
        elif held >= self.MAX_WINDOW:  # nothing but special tokens
            del self._window[self._num_given :]
        return new

    def flush(self) -> str:
        """What the tokens held back look like after all."""
        return self._decode(self._window)[len(self._given) :]

    @classmethod
    def _may_change(cls, text: str) -> int:
        """How many of the last characters the next token may still change."""
        return min(len(text) - len(text.rstrip(REPLACEMENT)), cls.MAX_HELD - 1)
