"""Damaged requests: random changes of bytes, of protobuf messages, and of JSON, repeatable by their seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = range(6)
"""Wire types of protobuf. 6 and 7 are none."""

NOT_UTF8 = (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80")
NOT_FINITE = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff" * 4)

Field = tuple[int, int, bytes]
"""Number, wire type, and what follows the tag."""


class Mutator:
    """Makes damaged copies of ``samples``."""

    def __init__(self, samples: Sequence[bytes], seed: int) -> None:
        self._samples = list(samples)
        self.random = random.Random(seed)

    def bytes(self) -> bytes:
        """A sample with one to four random changes."""
        data = bytearray(self.random.choice(self._samples))
        for _ in range(self.random.randint(1, 4)):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        draw = self.random
        start, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[draw.randrange(len(data))] = draw.choice((0x00, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == 2:
            del data[start:]
        elif kind == 3:
            data[end:end] = data[start:end] * draw.choice((1, 1, 2, 50))
        elif kind == 4:
            del data[start:end]
        elif kind == 5:
            data[start:start] = draw.randbytes(draw.randint(1, 9))
        else:
            other = draw.choice(self._samples)
            data[start:] = other[draw.randint(0, len(other)) :]


# --- protobuf --------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A number of up to 64 bits, as protobuf writes it."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def fields_of(data: bytes) -> list[Field]:
    """The fields of a valid message."""
    fields, at = [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire_type, start = tag >> 3, tag & 7, at
        if wire_type == VARINT:
            _, at = _read_varint(data, at)
        elif wire_type == BYTES:
            length, at = _read_varint(data, at)
            at += length
        else:
            at += {FIXED64: 8, FIXED32: 4}[wire_type]
        fields.append((number, wire_type, data[start:at]))
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def message_of(fields: Sequence[Field]) -> bytes:
    """The message with these fields."""
    return b"".join(varint(number << 3 | wire_type) + content for number, wire_type, content in fields)


def of_length(content: bytes) -> bytes:
    """What follows the tag of a field of bytes."""
    return varint(len(content)) + content


class ProtobufMutator(Mutator):
    """Knows the wire format, besides bytes. ``nested`` are the numbers of fields that are messages."""

    def __init__(self, samples: Sequence[bytes], seed: int, nested: frozenset[int]) -> None:
        super().__init__(samples, seed)
        self._nested = nested

    def draw(self) -> bytes:
        """A damaged message: of its bytes, of its fields, or of both."""
        if self.random.random() < 0.35:
            return self.bytes()
        data = self._with_other_fields(self.random.choice(self._samples), depth=0)
        if self.random.random() < 0.1:
            changed = bytearray(data)
            self._change(changed)
            return bytes(changed)
        return data

    def _with_other_fields(self, data: bytes, depth: int) -> bytes:
        draw, fields = self.random, fields_of(data)
        messages = [at for at, (number, _, _) in enumerate(fields) if number in self._nested]
        if messages and depth == 0 and draw.random() < 0.6:
            at = draw.choice(messages)
            number, wire_type, content = fields[at]
            _, start = _read_varint(content, 0)
            fields[at] = (number, wire_type, of_length(self._with_other_fields(content[start:], depth + 1)))
            return message_of(fields)
        for _ in range(draw.randint(1, 3)):
            self._change_field(fields, draw.randrange(len(fields) + 1))
        return message_of(fields)

    def _change_field(self, fields: list[Field], at: int) -> None:
        draw = self.random
        number, wire_type, content = fields[at] if at < len(fields) else (draw.randint(1, 20), VARINT, b"\x01")
        choices: list[Callable[[], Field]] = [
            lambda: (number, wire_type, content),  # once more
            lambda: (draw.choice((0, 15, 99, 2**29 - 1, 2**29)), VARINT, b"\x01"),  # unknown, or not allowed
            lambda: (number, draw.randrange(8), content),  # another type than its content
            lambda: (number, VARINT, varint(draw.choice((0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)))),
            lambda: (number, VARINT, b"\xff" * draw.randint(1, 12)),  # longer than 64 bits, or without an end
            lambda: (number, BYTES, varint(draw.choice((1, 2**20, 2**31 - 1, 2**31, 2**32, 2**63))) + b"x"),
            lambda: (number, BYTES, of_length(draw.choice(NOT_UTF8))),
            lambda: (number, BYTES, of_length(b"x" * draw.choice((0, 300, 2000, 70_000)))),
            lambda: (number, FIXED32, draw.choice(NOT_FINITE)),
            lambda: (number, FIXED64, b"\xff" * 8),
            lambda: (number, BYTES, of_length(varint(2**32 - 1) * draw.choice((1, 40, 2000)))),  # packed numbers
            lambda: (number, GROUP, b"" if draw.random() < 0.5 else varint(number << 3 | END_GROUP)),
        ]  # fmt: skip
        fields.insert(at, draw.choice(choices)())


# --- JSON ------------------------------------------------------------------------------------------------------------

RAW = (
    "NaN", "-NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "-0.0", "00", "01", "+1", ".5", "1.",
    "0x10", "9" * 400, "-" + "9" * 400, "1" + "0" * 5000, "0." + "1" * 5000, "18446744073709551616",
    "-9223372036854775809", "9007199254740993", "1.0", "true", "null", "nul", "undefined", "''", '"\\ud800"',
    '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', '"\t"', '"\x00"', '"' + "é日😀" * 30 + '"', '"' + "x" * 3000 + '"',
    "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000, "{}", "[]", "[[]]", "[null]", '""', "[1,]",
    '{"a":1,}', "/* */ 1", "",
)  # fmt: skip
"""Values as they stand in the text: valid ones at the limits, and ones that no JSON has."""

ODD_KEYS = (
    "", " ", "a b", "é", "a: b", "\x00", "model", "prompt", "constructor", "__proto__", "model_config", "x" * 5000, "0",
)  # fmt: skip


class JsonMutator(Mutator):
    """Knows JSON, besides bytes. ``samples`` are objects."""

    def __init__(self, samples: Sequence[dict[str, Any]], seed: int) -> None:
        super().__init__([json.dumps(sample).encode() for sample in samples], seed)
        self._objects = list(samples)

    def draw(self) -> bytes:
        """A damaged object: of its text, of its values, or of both."""
        if self.random.random() < 0.3:
            return self.bytes()
        value = copy.deepcopy(self.random.choice(self._objects))
        raw: list[str] = []
        for _ in range(self.random.randint(1, 3)):
            self._change_value(value, raw)
        text = json.dumps(value, ensure_ascii=self.random.random() < 0.5)
        for index, each in enumerate(raw):
            text = text.replace(json.dumps(_placeholder(index)), each)
        if self.random.random() < 0.15:  # a key twice
            text = text.replace("{", "{" + text[1:-1] + ",", 1) if len(text) > 2 else text
        data = text.encode(errors="surrogatepass")
        if self.random.random() < 0.1:
            changed = bytearray(data)
            self._change(changed)
            return bytes(changed)
        return data

    def _change_value(self, value: dict[str, Any] | list[Any], raw: list[str]) -> None:
        """Change something within an object or an array."""
        draw = self.random
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if keys and draw.random() < 0.4:
            inner = value[draw.choice(keys)]
            if isinstance(inner, dict | list):
                self._change_value(inner, raw)
                return
        raw.append(draw.choice(RAW))
        new = _placeholder(len(raw) - 1)
        if isinstance(value, list):
            value.insert(draw.randint(0, len(value)), new)
        elif keys and draw.random() < 0.2:
            del value[draw.choice(keys)]
        elif keys and draw.random() < 0.7:
            value[draw.choice(keys)] = new
        else:
            value[draw.choice(ODD_KEYS)] = new


def _placeholder(index: int) -> str:
    return f"@@{index}@@"
