"""Tokenizers: text to token ids, and token ids to text one at a time."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from gateway.shared_threads import SharedThreads
from pdserve.core.errors import InvalidRequest, ModelError

REPLACEMENT = "�"


def byte_of_character() -> dict[str, int]:
    """Inverse of the table by which byte-level BPE (GPT-2) represents bytes as printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDetokenizer:
    """Turns the tokens of one output into text, one at a time. A character spread over several tokens is emitted when
    it is complete, never as U+FFFD before. `flush` gives what is still incomplete at the end, as decoding the whole
    output would. For byte-level BPE, where every token is a run of bytes and an incremental UTF-8 decoder suffices."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters this token completes."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """As `ByteLevelDetokenizer`, for other tokenizers, such as sentencepiece, where a token's text depends on its
    predecessors: decodes a short window with and without the new tokens and emits the difference."""

    MAX_HELD = 4  # a character has at most 4 bytes, so older tokens cannot become complete
    MAX_WINDOW = 32

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """``context`` are the last tokens of the prompt, so that a first token that begins a word keeps its space."""
        self._decode = decode
        self._window = list(context)
        self._given = decode(self._window)  # the window's text that was emitted
        if self._given.endswith(REPLACEMENT):
            self._window, self._given = [], ""
        self._num_given = len(self._window)  # tokens of the window whose text was emitted

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
        elif new:  # the new tokens become the context of the next
            del self._window[: self._num_given]
            self._given, self._num_given = self._decode(self._window), len(self._window)
        elif held >= self.MAX_WINDOW:  # only special tokens
            del self._window[self._num_given :]
        return new

    def flush(self) -> str:
        """The text of the tokens that were held back."""
        return self._decode(self._window)[len(self._given) :]

    @classmethod
    def _may_change(cls, text: str) -> int:
        """Number of final characters that the next token may still change."""
        return min(len(text) - len(text.rstrip(REPLACEMENT)), cls.MAX_HELD - 1)


Detokenizer = ByteLevelDetokenizer | WindowDetokenizer

IN_THREAD_CHARACTERS = 2048
"""Shorter texts are encoded on the event loop, which blocks it for about 2 ms at most."""
NUM_THREADS = 2
"""Threads that encode longer texts, one text each."""
USUAL_TOKEN_BYTES = 4
"""A text with more bytes for each token that is allowed is not encoded before its tokens have been counted."""
PIECE_CHARACTERS = 2**16
"""Length of the pieces in which they are counted. Shorter texts are not counted."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte of a character that it lacks
WORD_BEGIN = "\u2581"  # how sentencepiece writes the space before a word
CONTEXT_TOKENS = 4  # tokens of the prompt that the text of the first output token depends on


class Tokenizer:
    """Reads ``tokenizer.json``, and the beginning-of-sequence settings of ``tokenizer_config.json``."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer: Any = HFTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise ModelError(f"{path}: not a readable tokenizer: {error}") from None
        config = read_json(folder / "tokenizer_config.json")
        bos = config.get("bos_token")
        bos_text = bos.get("content") if isinstance(bos, dict) else bos
        self._add_bos: bool | None = config.get("add_bos_token")
        self._bos_id: int | None = self._tokenizer.token_to_id(bos_text) if isinstance(bos_text, str) else None
        special = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in special.items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._alphabet = byte_of_character()
        decoder = read_json(path).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._threads = SharedThreads(NUM_THREADS, "tokenizer")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Byte-level BPE writes each byte as one character.
        self.longest_token_bytes = max(
            len(token) if self._is_byte_level else len(token.encode(errors="replace")) for token in vocabulary
        )

    def encode(self, text: str, max_tokens: int | None = None, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with the ``special_tokens`` that the model expects around a text. `InvalidRequest` if
        there are more than ``max_tokens``. Blocks for long texts, but releases the GIL."""
        special = special_tokens and self._add_bos is not False
        if max_tokens is not None:
            self._refuse_early(text, max_tokens)
        if len(text) < IN_THREAD_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
        else:  # `encode` would hold the GIL, even in a thread
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise InvalidRequest(f"prompt: {len(encoding)} tokens exceed the context of {max_tokens}; shorten it")
        ids: list[int] = encoding.ids
        if special_tokens and self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return tuple(ids)

    def _refuse_early(self, text: str, max_tokens: int) -> None:
        """`InvalidRequest` if a long text certainly has more than ``max_tokens``. An encoding takes 100 to 300 bytes of
        memory and 2 us per token, which for a text of 16 MiB are gigabytes and 20 s; here one piece is encoded at a
        time, until there are too many. Where a text is cut, one word may have more tokens than in the whole."""
        most_bytes = USUAL_TOKEN_BYTES * max_tokens
        if len(text) <= PIECE_CHARACTERS or (len(text) <= most_bytes and len(text.encode()) <= most_bytes):
            return
        count, most = 0, max_tokens
        for end in range(PIECE_CHARACTERS, len(text) + PIECE_CHARACTERS, PIECE_CHARACTERS):
            piece = text[end - PIECE_CHARACTERS : end]
            (encoding,) = self._tokenizer.encode_batch([piece], add_special_tokens=False)
            count += len(encoding)
            most += self.longest_token_bytes
            if count > most:
                raise InvalidRequest(
                    f"prompt: its first {min(end, len(text))} characters have more tokens than the context of "
                    f"{max_tokens}; shorten it"
                )

    async def encode_async(
        self, text: str, max_tokens: int | None = None, *, special_tokens: bool = True, client: str = ""
    ) -> tuple[int, ...]:
        """`encode` without blocking the event loop for long texts. A ``client`` has at most `NUM_THREADS` long texts in
        line for the threads, so that others do not wait for all that it sends."""
        encode = functools.partial(self.encode, text, max_tokens, special_tokens=special_tokens)
        if len(text) < IN_THREAD_CHARACTERS:
            return encode()
        return await self._threads.run(client, encode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """A new detokenizer for the output that follows ``prompt``."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, prompt[-CONTEXT_TOKENS:])

    def token_text(self, token_id: int) -> str:
        """The text of a single token: the name of a special token, U+FFFD for an incomplete character."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._is_byte_level and token_id not in self._special_ids:
            return self._token_bytes(token_id).decode(errors="replace")
        return token.replace(WORD_BEGIN, " ")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of a single token, which may be a part of a character."""
        token: str = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._special_ids:
            return token.encode()
        if self._is_byte_level:
            return self._token_bytes(token_id)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(WORD_BEGIN, " ").encode()

    def _token_bytes(self, token_id: int) -> bytes:
        if (known := self._bytes.get(token_id)) is None:
            token = "" if token_id in self._special_ids else self._tokenizer.id_to_token(token_id) or ""
            is_bytes = all(character in self._alphabet for character in token)
            known = bytes(self._alphabet[character] for character in token) if is_bytes else token.encode()
            self._bytes[token_id] = known
        return known


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The folder's tokenizer. None without a folder or ``tokenizer.json``; the model then takes token ids only.
    `ModelError` if the file is broken."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer(folder)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a model's folder; empty without the file. `ModelError` if it is no object."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold an object, not a {type(data).__name__}")
    return data
