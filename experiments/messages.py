"""How a program that measures talks with the processes that it starts: one `Message` a line, as a JSON object.

A line that is no message of the expected type raises `WrongMessage`. This module imports msgspec and the standard
library alone, because some of these processes run in an environment that has little else."""

from __future__ import annotations

import os
from types import UnionType
from typing import Any, TypeVar, get_args, overload

import msgspec

_SHOWN_BYTES = 300
_out = 1
T = TypeVar("T")


class WrongMessage(RuntimeError):
    """A process did not send what was expected; the text says what it was to send and what it sent."""


class Message(msgspec.Struct, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of all messages. The field ``kind`` of the line is the name of the class."""


class Done(Message):
    """What a call in another process gave."""

    value: Any = None


def line_of(message: Message) -> bytes:
    """The line that carries a message."""
    return msgspec.json.encode(message) + b"\n"


def say(message: Message) -> None:
    """Write a message to standard output."""
    with open(_out, "wb", closefd=False) as output:
        output.write(line_of(message))


def reserve_output() -> None:
    """Keep standard output for messages: whatever else is printed goes to standard error."""
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)


@overload
def message_of(line: bytes, expected: type[T], sender: str) -> T: ...


@overload
def message_of(line: bytes, expected: Any, sender: str) -> Any: ...


def message_of(line: bytes, expected: Any, sender: str) -> Any:
    """The message of type ``expected`` (any type that msgspec decodes, or a union) that ``line`` carries. WrongMessage
    names the ``sender`` if it carries another one, or is empty, as the output of a process that has ended is."""
    try:
        return msgspec.json.decode(line, type=expected)
    except msgspec.MsgspecError as error:
        kinds = get_args(expected) if isinstance(expected, UnionType) else (expected,)
        wanted = " or ".join(_shown(each) for each in kinds)
        if not line.strip():
            raise WrongMessage(f"{sender} ended before it sent {wanted}") from None
        raise WrongMessage(f"{sender} was to send {wanted}, and sent {line[:_SHOWN_BYTES]!r}: {error}") from None


def _shown(kind: Any) -> str:
    """The type, with the names of its fields if it is a message."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"{kind.__name__}({', '.join(kind.__struct_fields__)})"
    return str(kind)
