"""A Hugging Face folder's tokenizer: text to ids, and detokenizers for ids to text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from core.errors import ModelError
from gateway.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_of_character

IN_THREAD_CHARACTERS = 16_384  # shorter texts take less time than the way to a thread and back
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

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, with the special tokens the model expects around it. Blocks for long texts."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self._add_bos is not False).ids
        if self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return tuple(ids)

    async def encode_async(self, text: str) -> tuple[int, ...]:
        """The same, without holding up the event loop for long texts."""
        if len(text) < IN_THREAD_CHARACTERS:
            return self.encode(text)
        return await asyncio.to_thread(self.encode, text)

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
