"""Typed reading of JSON files and JSON lines, with errors that name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.core.errors import InvalidRequest

T = TypeVar("T")


def read_bytes(option: str, path: Path) -> bytes:
    """The content of ``path``; `InvalidRequest` naming ``option`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{option}: {path} cannot be read: {error.strerror or error}") from None


def read_text(option: str, path: Path) -> str:
    """The content of ``path``; `InvalidRequest` naming ``option`` if it cannot be read, or is not UTF-8."""
    try:
        return read_bytes(option, path).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{option}: {path} is not UTF-8 text (byte {error.start})") from None


def read_json_lines(option: str, path: Path, kind: type[T], expected: str) -> Iterator[tuple[int, T]]:
    """Line numbers (from 1) and lines as ``kind``. Empty lines are skipped. `InvalidRequest` names ``option`` if the
    file cannot be read, and file and line, followed by ``expected``, if a line is wrong."""
    for number, line in enumerate(read_bytes(option, path).splitlines(), 1):
        if line.strip():
            yield number, decode(line, kind, f"{path}:{number}", expected)


def decode(text: bytes, kind: type[T], where: str, expected: str) -> T:
    """JSON as ``kind``; `InvalidRequest` beginning with ``where`` and ending with ``expected`` if it is not."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{where}: {error}; expected {expected}") from None
