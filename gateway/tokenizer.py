"""A Hugging Face folder's tokenizer: text to ids, and detokenizers for ids to text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from gateway.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_of_character
from pdserve.core.errors import InvalidRequest, ModelError

IN_THREAD_CHARACTERS = 2048
"""Shorter texts are encoded on the event loop, which they hold up for some 2 ms at most."""
NUM_THREADS = 2
"""Threads that encode longer texts; one text takes one thread."""
WORD_BEGIN = "\u2581"  # how sentencepiece writes the space before a word
CONTEXT_TOKENS = 4  # of the prompt, before an output whose first token's text depends on them


class Tokenizer:
    """Reads ``tokenizer.json`` and what ``tokenizer_config.json`` says of the beginning-of-sequence token."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer: Any = HFTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception, whatever is wrong
            raise ModelError(f"{path}: not a readable tokenizer: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        bos = config.get("bos_token")
        bos_text = bos.get("content") if isinstance(bos, dict) else bos
        self._add_bos: bool | None = config.get("add_bos_token")
        self._bos_id: int | None = self._tokenizer.token_to_id(bos_text) if isinstance(bos_text, str) else None
        special = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in special.items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._alphabet = byte_of_character()
        decoder = _read_json(path).get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Byte-level BPE writes each byte as one character.
        self.longest_token_bytes = max(
            len(token) if self._is_byte_level else len(token.encode(errors="replace")) for token in vocabulary
        )

    def encode(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """The ids of a prompt, with the special tokens the model expects around it. `InvalidRequest` if they are more
        than ``max_tokens``. Blocks for long texts, but does not hold the GIL meanwhile."""
        special = self._add_bos is not False
        if len(text) < IN_THREAD_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
        else:  # `encode` would hold the GIL, even in a thread
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise InvalidRequest(f"prompt: {len(encoding)} tokens exceed the context of {max_tokens}; shorten it")
        ids: list[int] = encoding.ids
        if self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return tuple(ids)

    async def encode_async(self, text: str, max_tokens: int | None = None) -> tuple[int, ...]:
        """The same, without holding up the event loop for long texts."""
        if len(text) < IN_THREAD_CHARACTERS:
            return self.encode(text, max_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.encode, text, max_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of some tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for the output that follows ``prompt``."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, prompt[-CONTEXT_TOKENS:])

    def token_text(self, token_id: int) -> str:
        """What one token looks like by itself: a special one its name, an incomplete character U+FFFD."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._is_byte_level and token_id not in self._special_ids:
            return self._token_bytes(token_id).decode(errors="replace")
        return token.replace(WORD_BEGIN, " ")

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        return token.encode()


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The folder's tokenizer; None for a model without a folder or without ``tokenizer.json`` (it then takes token ids
    only). `ModelError` if the file is broken."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return Tokenizer(folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold an object, not a {type(data).__name__}")
    return data
