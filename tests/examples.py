"""Examples of messages, made of nothing but their types."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from pdserve.core.prefix_digests import BlockUpdate

STRINGS = ("", "r#1", "d\xe9code-0 \N{GRINNING FACE}")
NUMBERS = (0.0, -1.5, 1e9 + 0.5)


def example(kind: Any, draw: random.Random) -> Any:
    """A value of the type ``kind``, drawn within the bounds that it has."""
    return _drawn(msgspec.inspect.type_info(kind), draw)


def _drawn(info: Any, draw: random.Random) -> Any:
    many = range(draw.choice((0, 1, 3)))
    match info:
        case msgspec.inspect.UnionType(types=types):
            return _drawn(draw.choice(types), draw)
        case msgspec.inspect.StructType(cls=cls, fields=fields) | msgspec.inspect.DataclassType(cls=cls, fields=fields):
            if cls is BlockUpdate:  # hashes have eight bytes
                return BlockUpdate(3, 9, bytes(8 * len(many)), bytes(8))
            return cls(**{field.name: _drawn(field.type, draw) for field in fields})
        case msgspec.inspect.IntType(ge=ge, le=le):
            return draw.choice((ge or 0, 7, 2**31 if le is None else le))
        case msgspec.inspect.FloatType():
            return draw.choice(NUMBERS)
        case msgspec.inspect.StrType() | msgspec.inspect.AnyType():
            return draw.choice(STRINGS)
        case msgspec.inspect.BytesType():
            return bytes(many)
        case msgspec.inspect.BoolType():
            return draw.random() < 0.5
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.EnumType(cls=cls):
            return draw.choice(list(cls))
        case msgspec.inspect.LiteralType(values=values):
            return draw.choice(values)
        case msgspec.inspect.ListType(item_type=item):
            return [_drawn(item, draw) for _ in many]
        case msgspec.inspect.VarTupleType(item_type=item):
            return tuple(_drawn(item, draw) for _ in many)
        case msgspec.inspect.TupleType(item_types=items):
            return tuple(_drawn(item, draw) for item in items)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {_drawn(key, draw): _drawn(value, draw) for _ in many}
    raise AssertionError(f"no example of {info}")
